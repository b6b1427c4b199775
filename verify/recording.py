"""The recorder, which runs inside the programs that are compared and needs only torch.

The recorder writes one line of JSON for each event: "begin" (a rank has begun a step), "step", "epoch" (the DataLoader
of training data has delivered its last batch), "end" (the program has ended) or "failed". A step has one row for each
parameter: name, shape, initial digest, learning rate, and digests of its gradient and its new value. `unoptimized`
lists the tensors that no optimizer changes: buffers, and averages of the weights.
"""
import functools
import json
import os
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .digests import dense, digest, find_parts, marks, wave
from .draws import Draws
from .modules import Modules, tensors_of
from .samples import Samples


class Recorder:
    """Runs in each process of a command, and writes a line of JSON for each optimizer step."""

    def __init__(self, folder, native=False, steps=0, outputs_at=0, whole=None, resting=()):
        """Record up to `steps` steps (0: all) in `folder`; in step `outputs_at`, also module outputs and random draws.

        `whole` is the folder of the other command, if that command has ended. The tensors of this command may be parts
        of the tensors recorded there.
        A module whose class name contains one of the words in `resting` stays in evaluation mode.
        """
        self.folder, self.native, self.steps = folder, native, steps
        self.outputs_at, self.resting, other = outputs_at, resting, f"{whole}/marks"
        self.wholes = [*map(json.loads, open(other))] if os.path.exists(other) else []
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
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if function.__name__ == "tensor" and caller.startswith("torch.distributed."):
            return function(*args, **more)  # torch 2.11's pipelines receive it in torch.zeros(..., dtype=float32)
        narrow = (torch.float32, torch.bfloat16, torch.float16)[:3 if self.outer else 1]
        wide = {id(dtype): torch.float64 for dtype in narrow}
        more = {name: wide.get(id(value), value) for name, value in more.items()}
        return function(*[wide.get(id(value), value) for value in args], **more)

    def forget(self):
        """Reset all state, as in a new process."""
        self.file, self.count, self.outer, self.depth, self.parameters = None, 0, None, 0, []
        self.tables, self.optimized = {}, set()
        self.draws, self.modules, self.samples = Draws(), Modules(), Samples(self.write)
        self.clear()

    def clear(self):
        self.losses, self.clips, self.flags, self.begun = [], [], set(), False
        self.samples.batches, self.samples.evaluated, self.draws.sites = [], False, []
        self.outputs = []  # in step `outputs_at`: [name, width, size, squared norm, wave] of each module's output

    def write(self, event, **values):
        if not self.file:
            from multiprocessing.util import Finalize

            group = torch.distributed
            joined = group.is_available() and group.is_initialized()
            self.rank = group.get_rank() if joined else int(os.environ.get("RANK") or 0)
            self.world = group.get_world_size() if joined else int(os.environ.get("WORLD_SIZE") or 1)
            self.file = open(f"{self.folder}/{self.rank}-{os.getpid()}.jsonl", "w")
            Finalize(None, self.end, exitpriority=0)
        self.file.write(json.dumps({"event": event, **values}) + "\n")
        self.file.flush()

    def begin(self):
        """Record that this rank has begun a step. If the step never ends, another rank has left the loop."""
        if not self.begun:
            self.begun = True
            self.write("begin")

    def end(self):
        """Record how the program ends, and its buffers and averages, which may have changed after its last step."""
        if hasattr(sys, "last_value"):
            self.write("failed")
        elif not any(hasattr(tensor, "full_tensor") for _, tensor in self.modules.unoptimized):  # needs all ranks
            self.write("end", unoptimized=self.unoptimized())

    def unoptimized(self):
        digests = digest([tensor for _, tensor in self.modules.unoptimized])
        return [[name, list(tensor.shape), found] for (name, tensor), found in zip(self.modules.unoptimized, digests)]

    def autocast(self, function, context):
        self.flags |= {"torch.bfloat16"} if context._enabled and self.native else set()  # autocast skips float64
        return function(context)

    def clip(self, function, parameters, *args, **more):
        norm = function(parameters, *args, **more)
        bound = args[0] if args else more.get("max_norm", more.get("clip_value"))
        self.clips.append([0.0 if norm is None else float(dense(norm)), float(bound)])
        return norm

    def backward(self, function, tensors, *args, **more):
        if backward_runs():  # activation checkpointing calls backward inside another backward
            return function(tensors, *args, **more)
        for loss in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if isinstance(loss, torch.Tensor):  # in a pipeline, only the last stage has a loss
                self.losses.append(dense(loss).sum())
                self.flags.add(str(loss.dtype))
        self.flags |= {"random"} if self.draws.drawn() else set()
        grads = [item.grad for item in self.parameters if item.grad is not None]
        if self.samples.batches and self.parameters and not any(grad.any() for grad in grads):
            self.flags.add("reset")  # gradients were set to zero before a later micro-batch
        self.begin()
        self.samples.backward()
        return function(tensors, *args, **more)

    def deliver(self, function, iterator):
        batch = self.samples.deliver(function, iterator, self.native)
        if torch.is_grad_enabled():
            self.draws.note()
            if self.count == self.outputs_at - 1:
                self.draws.show()
            if id(iterator._dataset) in self.samples.trained:
                self.begin()
        return batch

    def call(self, function, module, /, *args, **more):
        """Record the inputs of the outermost module, which are the samples in a program without a DataLoader."""
        if torch.compiler.is_compiling():
            return function(module, *args, **more)
        training = module.training and torch.is_grad_enabled() and not backward_runs()
        if not self.depth and training and not self.samples.trained and not any(self.samples.pending.values()):
            tensors = [value for value in tensors_of((args, more)) if value.ndim > 0]
            trains = any(parameter.requires_grad for parameter in module.parameters())  # a loss has no parameters
            if trains and not any(tensor.requires_grad for tensor in tensors):  # not outputs of another module
                if not self.samples.inputs:
                    self.draws.note()
                self.samples.inputs.append(tensors)
        if module.training and any(word in type(module).__name__ for word in self.resting):
            module.eval()
        shown = self.count == self.outputs_at - 1 and training
        if shown:
            self.draws.show()
            if not self.modules.names:
                self.modules.find((), self.optimized)  # before the first step of an optimizer
        self.depth += 1
        self.draws.inside.append(self.modules.names.get(id(module)))
        try:
            output = function(module, *args, **more)
        finally:
            self.depth -= 1
            del self.draws.inside[-1:]
        if shown and id(module) in self.modules.names:
            self.outputs += sums_of(self.modules.names[id(module)], output)
        return output

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
        key = [id(item) for item in self.parameters]
        if self.tables.get(optimizer, [None])[0] != key:
            self.tables[optimizer] = key, *self.tabulate(self.modules.find(self.parameters, self.optimized))
        self.before = self.unoptimized()
        closure = len(args) > 1 or more.get("closure")
        scale = getattr(optimizer, "grad_scale", None)  # the fused kernel unscales inside the step
        self.grads = None if closure else digest(
            [item.grad if scale is None or item.grad is None else item.grad / scale for item in self.parameters],
            self.tables[optimizer][2])

    def tabulate(self, names):
        """Return a list of each parameter's (name, shape of the whole tensor, digest), and the list of Parts."""
        self.begin()
        parts = find_parts(names, self.parameters, self.wholes, self.rank)
        shapes = [list(item.shape) for item in self.parameters]
        for shape, part in zip(shapes, parts):
            if part:
                shape[part.axis] = part.total
        marked = [[*row, marks(item)] for *row, item in zip(names, shapes, self.parameters)]
        if self.rank == 0:
            with open(f"{self.folder}/marks", "a") as file:
                file.writelines(f"{json.dumps(row)}\n" for row in marked)
        return list(zip(names, shapes, digest(self.parameters, parts))), parts

    def after_step(self, optimizer, args, more):
        if optimizer is not self.outer:
            return
        self.outer = None
        norms, exact = torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm
        self.flags |= {"batchnorm" for item in self.modules.leaves
                       if item.training and isinstance(item, norms) and not isinstance(item, exact)}
        self.flags |= {"evaluated"} if self.samples.evaluated else set()
        _, table, parts = self.tables[optimizer]
        grads = self.grads or digest([item.grad for item in self.parameters], parts)
        table = zip(table, self.rates, grads, digest(self.parameters, parts), [
            part and [hash(part.places), len(part.places) / part.total] for part in parts])
        self.flags |= {str(item.dtype) for item in self.parameters}
        samples = sum(self.samples.batches, [])
        self.write("step", rows=[[*row, *more] for row, *more in table], samples=[value for value, *_ in samples],
                   labels=[label for _, label, _ in samples],
                   size=0 if self.samples.trained else max((size for *_, size in samples), default=0),
                   sites=self.draws.sites, batches=len(self.samples.batches), loss=sum(map(float, self.losses)),
                   clips=self.clips, flags=[*self.flags], settings=str(optimizer).splitlines(),
                   resting=sum(not item.training for item in self.modules.leaves),
                   unoptimized=self.before, outputs=self.outputs, replicas=self.modules.replicas)
        self.clear()
        self.draws.note()
        self.count += 1
        if self.count == self.steps:
            open(f"{self.folder}/done-{self.rank}-of-{self.world}", "w").close()
            while os.path.isdir(self.folder):  # other ranks may need this rank: wait until verify kills all ranks
                time.sleep(1)
            os._exit(0)


def backward_runs():
    return torch._C._current_graph_task_id() >= 0


def sums_of(name, output):
    """Return [[name, width, size, squared norm, wave]] of a module's output; the last three add up over ranks."""
    with torch.no_grad():
        found = [value for value in tensors_of(output) if value.is_floating_point()]
        if not found:
            return []
        flat = [value.double().reshape(-1, value.shape[-1] if value.ndim > 1 else 1) for value in found]
        waves = [(value @ wave(value.shape[1], value.device).real).sum() for value in flat]
        return [[name, found[0].shape[-1:], sum(value.numel() for value in flat),
                 float(sum(value.square().sum() for value in flat)), float(sum(waves))]]
