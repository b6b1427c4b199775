"""The recorder, which runs inside the programs that are compared and needs only torch.

The recorder writes one line of JSON for each event: "begin" (a rank has begun a step), "step", "epoch" (the DataLoader
of training data has delivered its last batch), "end" (the program has ended) or "failed". A step has one row for each
parameter: name, shape, initial digest, learning rate, and digests of its gradient and its new value. `held` lists the
tensors that no optimizer changes: buffers, and averages of the weights. A digest is the norm of a tensor and two
projections of it.
"""
import collections
import functools
import gc
import json
import math
import os
import sys
import time
import weakref
from typing import NamedTuple

FREQUENCIES = [math.sqrt(2 + axis) for axis in range(64)]  # of the plane wave in a digest, one for each axis


class Part(NamedTuple):
    """How a tensor is part of the other command's tensor: along `axis`, its `rows` are at `places` among `total`."""

    axis: int
    rows: tuple
    places: tuple
    total: int


class Recorder:
    """Runs in each process of a command, and writes a line of JSON for each optimizer step."""

    def __init__(self, folder, native=False, steps=0, outputs_at=0, whole=None, resting=()):
        """Record up to `steps` steps (0: all) in `folder`; in step `outputs_at`, also module outputs and random draws.

        `whole` is the folder of the other command, if that command has ended. The tensors of this command may be parts
        of the tensors recorded there.
        A module whose class name contains one of the words in `resting` stays in evaluation mode.
        """
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.torch, self.folder, self.native, self.steps = torch, folder, native, steps
        self.outputs_at, self.resting, other = outputs_at, resting, f"{whole}/marks"
        self.wholes = [*map(json.loads, open(other))] if os.path.exists(other) else []
        self.waves = {}  # (device, axis): the longest wave so far
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        patches = [(self.backward, torch.autograd, "backward"), (self.autocast, torch.autocast, "__enter__"),
                   (self.deliver, torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
                   (self.clip, torch.nn.utils, "clip_grad_norm_", "clip_grad_value_"),
                   (self.call, torch.nn.Module, "__call__")]
        if not native:
            torch.set_default_dtype(torch.float64)
            patches += [(self.cast, torch.Tensor, "float", "bfloat16", "half"), (self.widen, torch, "tensor"),
                        (self.widen, torch.Tensor, "to", "type"), (self.widen, torch.nn.functional, "softmax")]
        for around, owner, *names in patches:
            for name in names:
                setattr(owner, name, self.wrap(getattr(owner, name), around))

    def wrap(self, function, around):
        return functools.wraps(function)(lambda *args, **more: around(function, *args, **more))

    def cast(self, function, tensor, **more):
        """Cast to float64 instead of float32, except in GradScaler; in an optimizer's step, also instead of 16 bits."""
        scaler = sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"
        narrow = scaler if function.__name__ == "float" else not self.outer
        return function(tensor, **more) if narrow else tensor.double(**more)

    def widen(self, function, *args, **more):
        """Call a function with float64 instead of float32; in an optimizer's step, also instead of 16 bits."""
        torch, caller = self.torch, sys._getframe(2).f_globals.get("__name__", "")
        if function.__name__ == "tensor" and caller.startswith("torch.distributed."):
            return function(*args, **more)  # torch 2.11's pipelines receive it in torch.zeros(..., dtype=float32)
        narrow = (torch.float32, torch.bfloat16, torch.float16)[:3 if self.outer else 1]
        wide = {id(dtype): torch.float64 for dtype in narrow}
        more = {name: wide.get(id(value), value) for name, value in more.items()}
        return function(*[wide.get(id(value), value) for value in args], **more)

    def forget(self):
        """Reset all state, as in a new process."""
        self.file, self.count, self.outer, self.depth, self.recomputing = None, 0, None, 0, False
        self.tables, self.trained, self.optimized, self.drawing = {}, set(), set(), None
        self.kept, self.modules, self.names, self.inside = [], [], {}, []  # `inside`: modules now in forward()
        self.held, self.parameters, self.replicas = [], [], False
        self.pending = weakref.WeakKeyDictionary()  # DataLoader iterator: its batches since the last backward pass
        self.clear()
        self.drawn = None  # None until the program has created its model

    def clear(self):
        self.samples, self.losses, self.clips, self.flags, self.begun = [], [], [], set(), False
        self.inputs = []  # inputs of the outermost modules since the last backward pass
        self.outputs = []  # in step `outputs_at`: [name, width, size, squared norm, wave] of each module's output
        self.sites = []  # in step `outputs_at`: where random numbers are drawn
        self.drawn = self.draws()

    def draws(self):
        """Return the states of the random generators, which change if the model draws numbers, as dropout does."""
        cuda = self.torch.cuda
        states = [self.torch.get_rng_state(), *([cuda.get_rng_state()] if cuda.is_initialized() else [])]
        return [bytes(state.tolist()) for state in states]

    def write(self, event, **values):
        if not self.file:
            from multiprocessing.util import Finalize

            group = self.torch.distributed
            joined = group.is_available() and group.is_initialized()
            self.rank = group.get_rank() if joined else int(os.environ.get("RANK") or 0)
            self.world = group.get_world_size() if joined else int(os.environ.get("WORLD_SIZE") or 1)
            self.file = open(f"{self.folder}/{self.rank}-{os.getpid()}.jsonl", "w")
            Finalize(None, self.end, exitpriority=0)
        self.file.write(json.dumps({"event": event, **values}) + "\n")
        self.file.flush()

    def end(self):
        """Record how the program ends, and its buffers and averages, which may have changed after its last step."""
        if hasattr(sys, "last_value"):
            self.write("failed")
        elif not any(hasattr(tensor, "full_tensor") for _, tensor in self.kept):  # gathering would need all ranks
            self.write("end", held=self.look_at_kept())

    def look_at_kept(self):
        with self.torch.no_grad():
            digests = self.digest([tensor for _, tensor in self.kept])
        return [[name, list(tensor.shape), digest] for (name, tensor), digest in zip(self.kept, digests)]

    def whole(self, tensor):
        """Return the full tensor, dense and in float64, on a device that supports float64."""
        tensor = tensor.detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        tensor = tensor.cpu() if tensor.device.type == "mps" else tensor
        return (tensor.to_dense() if tensor.layout != self.torch.strided else tensor).double()

    def digest(self, tensors, parts=()):
        """Return the norm and two projections of each tensor or, with `parts`, of a part of it. None counts as zero."""
        torch, found = self.torch, []
        for tensor, part in zip(tensors, parts or [None] * len(tensors)):
            part = None if tensor is None else part
            tensor = self.whole(torch.zeros(1) if tensor is None else tensor)
            if part:
                tensor = tensor.index_select(part.axis, torch.tensor(part.rows, device=tensor.device))
            found.append(torch.cat([tensor.norm()[None], self.project(tensor, part)]))
        alike = len({item.device for item in found}) < 2
        return torch.stack(found if alike else [item.cpu() for item in found]).tolist() if found else []

    def project(self, tensor, part=None):
        """Return a tensor's projections on a plane wave's real and imaginary parts. Those of all parts add up."""
        torch, shape, device = self.torch, tensor.shape or (1,), tensor.device
        for axis, size in enumerate(shape):  # the plane wave is the product of one wave for each axis
            wave = self.wave(size, device, axis)
            if part and part.axis == axis:
                wave = self.wave(part.total, device, axis)[torch.tensor(part.places, device=device)]
            tensor = tensor.reshape(size, math.prod(shape[axis + 1:]))
            tensor = wave @ tensor if axis else torch.complex(*torch.view_as_real(wave).T @ tensor)
        return torch.view_as_real(tensor[0])

    def wave(self, size, device, axis=0):
        """Return the first `size` values of the wave along one axis, as complex numbers."""
        if len(self.waves.get((device, axis), ())) < max(size, 1):
            phase = FREQUENCIES[axis] * self.torch.arange(1, size + 1, dtype=self.torch.float64, device=device)
            self.waves[device, axis] = self.torch.complex(phase.cos(), phase.sin())
        return self.waves[device, axis][:size]

    def marks(self, tensor):
        """Return, for each axis of a tensor, a string for each slice along it; equal slices have equal strings."""
        tensor, found = self.whole(tensor), []
        for axis in range(tensor.ndim):
            flat = tensor.movedim(axis, 0)
            flat = flat.reshape(len(flat), math.prod(flat.shape[1:]))
            flat = flat @ self.wave(flat.shape[1], flat.device).real
            found.append([f"{value:.8g}" for value in flat.tolist()])
        return found

    def find_parts(self, names):
        """Return, for each parameter, its Part if it is a part of one of the other command's tensors, or None."""
        found, known = [], {}
        for number, (name, item) in enumerate(zip(names, self.parameters)):
            near = sorted(range(len(self.wholes)), key=lambda n: (self.wholes[n][0] != name, abs(n - number)))
            near = [self.wholes[n] for n in near if len(self.wholes[n][1]) == item.ndim]
            same = [row for row in near if row[1] == list(item.shape)]
            marks = near and name not in [row[0] for row in same] and self.marks(item)
            whole = not marks or near[0][0] != name and marks in [row[2] for row in same]
            parts = (self.find_part(item.shape, marks, *row[1:], known) for row in near if not whole)
            found.append(next(filter(None, parts), None))
        return found

    def find_part(self, shape, marks, other, others, known):
        """Return a tensor's Part if it is a part of `other`, or None. `known` maps (own, full size) to found rows."""
        axes = [axis for axis, pair in enumerate(zip(shape, other)) if pair[0] != pair[1]]
        if len(axes) != 1:
            return None
        own, theirs, size, total = marks[axes[0]], others[axes[0]], shape[axes[0]], other[axes[0]]
        counts, places = collections.Counter(theirs), dict(zip(theirs, range(total)))
        hits = {row: places[mark] for row, mark in enumerate(own) if counts[mark] == 1}
        offsets = {place - row for row, place in hits.items()} or {self.rank * size % total}
        if not hits and not {*own} <= {*theirs}:
            return None
        if not hits and (size, total) in known:  # all rows are equal: reuse another tensor's layout
            hits = known[size, total]
        elif len(offsets) == 1:
            hits = {row: row + min(offsets) for row in range(size) if 0 <= row + min(offsets) < total}
        known[size, total] = hits
        return Part(axes[0], (*hits,), (*hits.values(),), total)

    def autocast(self, function, context):
        self.flags |= {"torch.bfloat16"} if context._enabled and self.native else set()  # autocast skips float64
        return function(context)

    def clip(self, function, parameters, *args, **more):
        norm = function(parameters, *args, **more)
        bound = args[0] if args else more.get("max_norm", more.get("clip_value"))
        self.clips.append([0.0 if norm is None else float(self.whole(norm)), float(bound)])
        return norm

    def backward(self, function, tensors, *args, **more):
        if self.recomputing:  # activation checkpointing calls backward inside another backward
            return function(tensors, *args, **more)
        for loss in [tensors] if isinstance(tensors, self.torch.Tensor) else tensors:
            if isinstance(loss, self.torch.Tensor):  # in a pipeline, only the last stage has a loss
                self.losses.append(self.whole(loss).sum())
                self.flags.add(str(loss.dtype))
        self.flags |= {"random"} if self.drawn and self.drawn != self.draws() else set()
        grads = [item.grad for item in self.parameters if item.grad is not None]
        if self.samples and self.parameters and not any(grad.any() for grad in grads):
            self.flags.add("reset")  # gradients were set to zero before a later micro-batch
        self.begin()
        for iterator, batches in self.pending.items():
            self.trained.add(id(iterator._dataset))
            self.samples += batches
            batches.clear()
        self.samples += [] if self.trained else map(self.sample, self.inputs)
        self.inputs.clear()
        self.recomputing = True  # activation checkpointing calls modules here
        try:
            return self.nested(function, tensors, *args, **more)
        finally:
            self.recomputing = False

    def nested(self, function, /, *args, **more):
        self.depth += 1
        try:
            return function(*args, **more)
        finally:
            self.depth -= 1

    def call(self, function, module, /, *args, **more):
        """Record the inputs of the outermost module, which are the samples in a program without a DataLoader."""
        torch = self.torch
        if torch.compiler.is_compiling():
            return function(module, *args, **more)
        loaded = self.trained or any(self.pending.values())
        training = module.training and torch.is_grad_enabled()
        if not self.depth and not loaded and training:
            leaves = torch.utils._pytree.tree_leaves((args, more))
            tensors = [value for value in leaves if type(value) is torch.Tensor and value.ndim > 0 and not value.is_meta
                       and value.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(value)]
            trains = any(parameter.requires_grad for parameter in module.parameters())  # a loss has no parameters
            if trains and not any(tensor.requires_grad for tensor in tensors):  # not outputs of another module
                self.drawn = self.drawn if self.inputs else self.draws()
                self.inputs.append(tensors)
        if module.training and any(word in type(module).__name__ for word in self.resting):
            module.eval()
        shown = self.count == self.outputs_at - 1 and training and not self.recomputing
        if shown:
            self.show_draws()
        self.inside.append(module)
        try:
            output = self.nested(function, module, *args, **more)
        finally:
            del self.inside[-1:]
        self.outputs += self.look_at_output(module, output) if shown else []
        return output

    def show_draws(self):
        """From now on, record where torch functions draw random numbers, except in the backward pass."""
        recorder, library = self, os.path.dirname(self.torch.__file__)

        class Draws(self.torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                before, result, frame = recorder.draws(), function(*args, **(kwargs or {})), sys._getframe(1)
                while frame.f_back and frame.f_code.co_filename.startswith((library, __file__)):
                    frame = frame.f_back
                if before != recorder.draws() and not recorder.recomputing:
                    names = [recorder.names.get(id(module)) for module in recorder.inside[-1:]]
                    where = [f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}", *filter(None, names)]
                    recorder.sites.append(", module ".join(where))
                return result

        if not self.drawing:
            self.drawing = Draws()
            self.drawing.__enter__()

    def look_at_output(self, module, output):
        """Return [[name, width, size, squared norm, wave]] of a module's output; the last three add up over ranks."""
        torch = self.torch
        if not self.names:
            self.look()  # before the first step of an optimizer
        with torch.no_grad():
            found = [value for value in torch.utils._pytree.tree_leaves(output) if type(value) is torch.Tensor
                     and value.is_floating_point() and not value.is_meta and value.layout == torch.strided
                     and not torch._C._functorch.is_functorch_wrapped_tensor(value)]
            if not found or id(module) not in self.names:
                return []
            flat = [value.double().reshape(-1, value.shape[-1] if value.ndim > 1 else 1) for value in found]
            waves = [(value @ self.wave(value.shape[1], value.device).real).sum() for value in flat]
            return [[self.names[id(module)], found[0].shape[-1:], sum(value.numel() for value in flat),
                     float(sum(value.square().sum() for value in flat)), float(sum(waves))]]

    def begin(self):
        """Record that this rank has begun a step. If the step never ends, another rank has left the loop."""
        if not self.begun:
            self.begun = True
            self.write("begin")

    def deliver(self, function, iterator):
        """Record the samples of a batch that a DataLoader delivers; return the batch, in float64 unless `native`."""
        torch, tensors = self.torch, []

        def visit(value):
            if isinstance(value, torch.Tensor):
                value = value.double() if value.is_floating_point() and not self.native else value
                tensors.extend([value] * (value.ndim > 0))
            elif isinstance(getattr(value, "data", None), dict):  # a UserDict, such as transformers' BatchEncoding
                value.data = torch.utils._pytree.tree_map(visit, value.data)
            return value

        try:
            batch = torch.utils._pytree.tree_map(visit, function(iterator))
        except StopIteration:
            self.flags |= {"evaluated"} if self.pending.pop(iterator, None) else set()  # batches with no backward pass
            if id(iterator._dataset) in self.trained and self.torch.is_grad_enabled():
                sampler = getattr(iterator, "_index_sampler", None)
                for name in ("batch_sampler", "sampler"):  # accelerate wraps the sampler in another sampler
                    sampler = getattr(sampler, name, sampler)
                settable = ", which has set_epoch" * any(hasattr(x, "set_epoch") for x in (sampler, iterator._dataset))
                self.write("epoch", shuffled=bool(getattr(sampler, "shuffle", False)),
                           sampler=type(sampler).__name__ + settable)
            raise
        except Exception:
            self.write("failed")
            raise
        if not torch.is_grad_enabled():
            self.flags.add("evaluated")
            return batch
        if isinstance(batch, (list, tuple)) and batch and all(isinstance(part, (list, tuple)) for part in batch):
            tensors = []  # collate_fn did not stack the samples, so a tensor's length is not the number of samples
        self.pending.setdefault(iterator, []).append(self.sample(tensors))
        self.drawn = self.draws()
        if self.count == self.outputs_at - 1:
            self.show_draws()
        if id(iterator._dataset) in self.trained:
            self.begin()
        return batch

    def sample(self, tensors):
        """Return (digest, digest of label, number of values) per sample. Augmentation changes only the first digest."""
        lengths = [len(tensor) for tensor in tensors]
        rows = max(lengths, key=lengths.count, default=0)
        digest, labels = self.torch.zeros(2, rows, dtype=self.torch.float64, device="cpu")
        for n, tensor in enumerate([tensor for tensor in tensors if len(tensor) == rows > 0], 1):
            flat = tensor.detach().cpu().double().reshape(rows, -1)
            flat = flat.masked_fill(flat == -100, 0)  # mask padded labels with 0, which adds nothing to the digest
            wave = self.wave(flat.shape[1], flat.device)
            digest += flat @ (wave.imag if n % 2 else wave.real) * n
            labels += flat[:, 0] * n if tensor.ndim == 1 and not tensor.is_floating_point() else 0
        size = sum(tensor[0].numel() for tensor in tensors if len(tensor) == rows > 0)
        return [(*pair, size) for pair in zip(digest.tolist(), labels.tolist())]

    def before_step(self, optimizer, args, more):
        if self.outer not in (None, optimizer):
            return  # an optimizer inside another one, as in ZeroRedundancyOptimizer
        if float(getattr(optimizer, "found_inf", None) or 0):
            return  # GradScaler found infinite gradients: the fused kernel skips this step
        self.outer = optimizer
        trained = [(item, group) for group in optimizer.param_groups for item in group["params"]
                   if item.requires_grad and not item.is_meta]  # meta: the data is in another process
        self.parameters = [item for item, _ in trained]
        self.optimized |= {id(item) for item in self.parameters}
        self.rates = [[float(group.get("lr") or 0)] for _, group in trained]
        with self.torch.no_grad():
            key = [id(item) for item in self.parameters]
            if self.tables.get(optimizer, [None])[0] != key:
                self.tables[optimizer] = key, *self.tabulate(self.look())
            self.held = self.look_at_kept()
            closure = len(args) > 1 or more.get("closure")
            scale = getattr(optimizer, "grad_scale", None)  # the fused kernel unscales inside the step
            self.grads = None if closure else self.digest(
                [item.grad if scale is None or item.grad is None else item.grad / scale for item in self.parameters],
                self.tables[optimizer][2])

    def tabulate(self, names):
        """Return a list of each parameter's (name, shape of the whole tensor, digest), and the list of Parts."""
        self.begin()
        parts = self.find_parts(names)
        shapes = [list(item.shape) for item in self.parameters]
        for shape, part in zip(shapes, parts):
            if part:
                shape[part.axis] = part.total
        marked = [[*row, self.marks(item)] for *row, item in zip(names, shapes, self.parameters)]
        if self.rank == 0:
            with open(f"{self.folder}/marks", "a") as file:
                file.writelines(f"{json.dumps(row)}\n" for row in marked)
        return list(zip(names, shapes, self.digest(self.parameters, parts))), parts

    def look(self):
        """Find all modules, buffers and averages of the weights; return a name for each parameter."""
        gc.unfreeze()  # gc.get_objects() omits objects that the program has frozen
        torch, names = self.torch, {}
        modules = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]
        inside = {id(child) for module in modules for child in module.children()}
        outermost = [module for module in modules if id(module) not in inside]
        for module in modules:
            for name, item in module.named_parameters():
                names[id(item)] = max(names.get(id(item), ""), plain(name), key=len)
        self.names = {id(part): plain(name) for module in outermost for name, part in module.named_modules() if name}
        self.modules = [module for module in modules if not module._modules]
        self.replicas = any(isinstance(module, torch.nn.parallel.DistributedDataParallel)
                              and module.process_group.size() == torch.distributed.get_world_size()
                              for module in modules)
        shapes = lambda module: [item.shape for item in module.parameters()]  # noqa: E731
        trained = [module for module in outermost if any(id(item) in self.optimized for item in module.parameters())]
        averages = [module for module in outermost if module not in trained and shapes(module)
                    and shapes(module) in map(shapes, trained)]
        kept = {id(item): (f"{'buffer' if module in trained else 'other buffer'} {plain(name)}", item)
                for module in outermost for name, item in module.named_buffers()}
        kept |= {id(item): (f"weight {plain(name)}", item) for module in trained  # that other ranks update
                 for name, item in module.named_parameters() if item.requires_grad and id(item) not in self.optimized}
        for module in averages:
            kept |= {id(item): (f"average of {plain(name)}", item) for name, item in module.named_parameters()}
            kept |= {id(item): (f"average's buffer {plain(name)}", item) for name, item in module.named_buffers()}
        self.kept = sorted(((name, item) for name, item in kept.values() if item.is_floating_point() and item.numel()
                            and not item.is_meta), key=lambda pair: pair[0])
        return [names.get(id(item), "parameter") for item in self.parameters]

    def after_step(self, optimizer, args, more):
        if optimizer is not self.outer:
            return
        torch, self.outer = self.torch, None
        norms, exact = torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm
        self.flags |= {"batchnorm" for item in self.modules
                       if item.training and isinstance(item, norms) and not isinstance(item, exact)}
        with torch.no_grad():
            _, table, parts = self.tables[optimizer]
            grads = self.grads or self.digest([item.grad for item in self.parameters], parts)
            table = zip(table, self.rates, grads, self.digest(self.parameters, parts), [
                part and [hash(part.places), len(part.places) / part.total] for part in parts])
        self.flags |= {str(item.dtype) for item in self.parameters}
        samples = sum(self.samples, [])
        self.write("step", rows=[[*row, *more] for row, *more in table], samples=[value for value, *_ in samples],
                   labels=[label for _, label, _ in samples],
                   size=0 if self.trained else max((size for *_, size in samples), default=0),
                   sites=self.sites, batches=len(self.samples), loss=sum(map(float, self.losses)), clips=self.clips,
                   flags=[*self.flags], resting=sum(not item.training for item in self.modules),
                   settings=str(optimizer).splitlines(), held=self.held, outputs=self.outputs, replicas=self.replicas)
        self.clear()
        self.count += 1
        if self.count == self.steps:
            open(f"{self.folder}/done-{self.rank}-of-{self.world}", "w").close()
            while os.path.isdir(self.folder):  # other ranks may need this rank: wait until verify kills all ranks
                time.sleep(1)
            os._exit(0)


def plain(name):
    """Return the name of a parameter, buffer or module without the prefixes that DDP, FSDP and others add."""
    for wrapper in ("_forward_module.", "_orig_mod.", "_fsdp_wrapped_module.", "module."):
        name = name.replace(wrapper, "")
    return name
