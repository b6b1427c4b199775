"""Run two commands that train with torch, and report whether they train the same model.

    python verify.py "python train.py --epochs 2" "torchrun --nproc-per-node=2 train_DDP.py --epochs 2"

The programs need no changes. This file needs only torch, so you can copy it anywhere. Exit code 0: the same model. Exit
code 1: different models; the output names the first step and parameter that differ, and the likely cause. Exit code 2:
the runs are not comparable, or the usage is wrong.

A hook runs in every Python process that imports torch. It makes float64 the default type, and replaces float32 in
batches and casts. In optimizers, it also replaces casts to 16 bits. So two correct programs differ by about 1e-15, and
autocast and loss scaling do not round. At each optimizer step, the hook on each rank records the learning rates, and
digests of all parameters, gradients and samples. The samples are what DataLoader delivers. In a program without
DataLoader, they are the inputs of the outermost module.

The models differ if the relative difference at a step exceeds 1e-9 and 1000 times all earlier differences, or if it
exceeds 1e-4. Rounding errors grow slowly, but a mistake appears at once. If a program fails in float64, or still
computes in lower precision, both run again in their own precision. The limits are then 1e-4, 1000 and 0.1 (with 16
bits: 0.05, 1000 and 0.5). If randomness can be the cause, command A runs twice, which shows whether it is reproducible.

Both commands must start from scratch with fixed seeds, and neither may read what the other one writes. No rank may
restart. The hook does not see steps in a CUDA graph, buffers, anything after the last step, optimizers that do not
derive from torch.optim.Optimizer, or Python with `-E`, `-I` or `-S`. It gathers DTensors. verify.py matches pipeline
stages by their initial weights. It joins equal slices of a tensor on consecutive ranks if the other command holds the
whole tensor. It cannot match the flat parameters of FSDP1. The cause that it names is an informed guess.
"""
import argparse
import cmath
import functools
import gc
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

SITE = """import importlib.machinery, importlib.util, os, runpy, sys
class OnTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            if spec := importlib.util.find_spec(name):
                load = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (
                    sys.meta_path.remove(self), load(module), runpy.run_path({file!r})["Recorder"](**{options!r}))
            sys.meta_path.insert(0, self)  # some libraries only check that torch exists
            return spec
sys.meta_path.insert(0, OnTorch())
path = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", path):  # the next one on the path
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
REMEDIES = {
    "start": "set the same seed on every rank before you create the model, and wrap the model in DDP",
    "not-averaged": "call the DDP wrapper, not the model in it; leave no_sync() for the last micro-batch (pitfall P12)",
    "rank-lr": "call scheduler.step() on every rank, with a metric that is reduced over all ranks (pitfall P15)",
    "set-epoch": "call sampler.set_epoch(epoch) at the start of every epoch (pitfall D1)",
    "scale": "average over ranks instead of summing; divide each micro-batch's loss by their number (pitfall P5)",
    "learning-rate": "compare the learning rates, their scaling with the batch size, and the schedulers (pitfall D6)",
    "batch-size": "divide the batch size by the number of processes; compare drop_last and epochs (pitfall D6)",
    "samples": "give each rank its own share, as DistributedSampler does; compare seed, shuffle and drop_last; make "
               "random augmentation depend on (seed, epoch, index) (pitfall D3)",
    "evaluation": "call model.eval() before an evaluation and model.train() after it (pitfall E1)",
    "batchnorm": "BatchNorm normalizes each process's share separately: use SyncBatchNorm, or accept the difference",
    "uneven-mean": "divide the sum of the losses by the count over all ranks, not by each rank's own count",
    "rank-stops": "let all ranks decide from the same reduced value when to stop (pitfall P14)",
    "clip": "clip once per step, after the gradients are averaged and unscaled (pitfall P6)",
    "random": "set dropout to 0 to compare the rest; make random draws depend on the sample, not the rank (pitfall D3)",
    "unknown": "no known pattern; compare what the two programs do in this step"}
FREQUENCIES = [math.sqrt(2 + axis) for axis in range(64)]  # of the plane wave in a digest, for each axis of a tensor
START, RATE, GRAD, VALUE = 2, 3, 4, 5  # columns in a parameter's row, after its name and shape


def environment(folder, native=False, steps=0):
    """Return the environment variables that make a command record its steps in `folder`."""
    site = Path(folder).resolve() / "site"
    site.mkdir(parents=True)
    options = {"folder": str(site.parent), "native": native, "steps": steps}
    (site / "sitecustomize.py").write_text(SITE.format(file=os.path.abspath(__file__), options=options))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}


class Recorder:
    """Runs in each process of a command, and writes a line of JSON for each optimizer step."""

    def __init__(self, folder, native, steps):
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.torch, self.folder, self.native, self.steps = torch, folder, native, steps
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
        """Return float64 instead, except for GradScaler, which needs float32, and for 16 bits outside optimizers."""
        scaler = sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"
        narrow = scaler if function.__name__ == "float" else not self.outer
        return function(tensor, **more) if narrow else tensor.double(**more)

    def widen(self, function, *args, **more):
        torch = self.torch
        narrow = (torch.float32, torch.bfloat16, torch.float16)[:3 if self.outer else 1]
        wide = {id(dtype): torch.float64 for dtype in narrow}
        more = {name: wide.get(id(value), value) for name, value in more.items()}
        return function(*[wide.get(id(value), value) for value in args], **more)

    def forget(self):
        """Reset all state, as in a new process."""
        self.file, self.count, self.outer, self.depth = None, 0, None, 0
        self.tables, self.trained = {}, set()
        self.pending = weakref.WeakKeyDictionary()  # DataLoader iterator: its batches since the last backward pass
        self.clear()

    def clear(self):
        self.samples, self.losses, self.clips, self.flags, self.begun = [], [], [], set(), False
        self.inputs = []  # inputs of the outermost modules since the last backward pass
        self.drawn = self.draws()

    def draws(self):
        """Return the states of the random generators: they change if the model draws, as dropout does."""
        cuda = self.torch.cuda
        states = [self.torch.get_rng_state(), *([cuda.get_rng_state()] if cuda.is_initialized() else [])]
        return [state.numpy().tobytes() for state in states]

    def write(self, event, **values):
        if not self.file:
            from multiprocessing.util import Finalize

            group = self.torch.distributed
            joined = group.is_available() and group.is_initialized()
            self.rank = group.get_rank() if joined else int(os.environ.get("RANK") or 0)
            self.world = group.get_world_size() if joined else int(os.environ.get("WORLD_SIZE") or 1)
            self.file = open(f"{self.folder}/{self.rank}-{os.getpid()}.jsonl", "w")
            Finalize(None, lambda: hasattr(sys, "last_value") and self.write("failed"), exitpriority=0)
        self.file.write(json.dumps({"event": event, **values}) + "\n")
        self.file.flush()

    def whole(self, tensor):
        """Return a tensor gathered, dense and in float64, on a device that has float64."""
        tensor = tensor.detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        tensor = tensor.cpu() if tensor.device.type == "mps" else tensor
        return (tensor.to_dense() if tensor.layout != self.torch.strided else tensor).double()

    def digest(self, tensors):
        """Return the norm and two projections of each tensor; a gradient of None counts as zero."""
        found = []
        for tensor in tensors:
            tensor = self.whole(self.torch.zeros(1) if tensor is None else tensor)
            projections = self.waves(tensor.shape, tensor.device) @ tensor.flatten()
            found.append(self.torch.cat([tensor.norm()[None], projections]))
        alike = len({item.device for item in found}) < 2
        return self.torch.stack(found if alike else [item.cpu() for item in found]).tolist() if found else []

    @functools.cache  # noqa: B019
    def waves(self, shape, device):
        """Return the real and imaginary parts of a plane wave: an offset along an axis shifts only its phase."""
        phase = self.torch.zeros(shape, dtype=self.torch.float64, device=device)
        for axis, size in enumerate(shape):
            phase.movedim(axis, -1).add_(FREQUENCIES[axis] * self.torch.arange(1, size + 1, device=device))
        return self.torch.stack([phase.cos(), phase.sin()]).reshape(2, -1)

    def autocast(self, function, context):
        self.flags |= {"torch.bfloat16"} if context._enabled and self.native else set()  # autocast skips float64
        return function(context)

    def clip(self, function, parameters, *args, **more):
        norm = function(parameters, *args, **more)
        bound = args[0] if args else more.get("max_norm", more.get("clip_value"))
        self.clips.append([0.0 if norm is None else float(self.whole(norm)), float(bound)])
        return norm

    def backward(self, function, tensors, *args, **more):
        for loss in [tensors] if isinstance(tensors, self.torch.Tensor) else tensors:
            if isinstance(loss, self.torch.Tensor):  # not the output of a pipeline stage: its loss is elsewhere
                self.losses.append(self.whole(loss).sum())
                self.flags.add(str(loss.dtype))
        self.flags |= {"random"} if self.drawn != self.draws() else set()
        self.begin()
        for iterator, batches in self.pending.items():
            self.trained.add(id(iterator._dataset))
            self.samples += batches
            batches.clear()
        self.samples += [] if self.trained else map(self.sample, self.inputs)
        self.inputs.clear()
        return self.nested(function, tensors, *args, **more)  # activation checkpointing calls modules here

    def nested(self, function, *args, **more):
        self.depth += 1
        try:
            return function(*args, **more)
        finally:
            self.depth -= 1

    def call(self, function, module, *args, **more):
        """Record the inputs of the outermost module, which are the samples in a program without DataLoader."""
        torch = self.torch
        if torch.compiler.is_compiling():
            return function(module, *args, **more)
        loaded = self.trained or any(self.pending.values())
        if not self.depth and not loaded and module.training and torch.is_grad_enabled():
            leaves = torch.utils._pytree.tree_leaves((args, more))
            tensors = [value for value in leaves if type(value) is torch.Tensor and value.ndim > 0 and not value.is_meta
                       and value.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(value)]
            trains = any(parameter.requires_grad for parameter in module.parameters())  # false for a loss
            if trains and not any(tensor.requires_grad for tensor in tensors):  # not another module's output
                self.drawn = self.drawn if self.inputs else self.draws()
                self.inputs.append(tensors)
        return self.nested(function, module, *args, **more)

    def begin(self):
        """Record that this rank has begun a step: if it never ends, another rank has left the loop."""
        if not self.begun:
            self.begun = True
            self.write("begin")

    def deliver(self, function, iterator):
        """Record the samples of a batch that DataLoader delivers, and return it in float64."""
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
            self.flags |= {"evaluated"} if self.pending.pop(iterator, None) else set()  # no backward pass followed
            raise
        except Exception:
            self.write("failed")
            raise
        if not torch.is_grad_enabled():
            self.flags.add("evaluated")
            return batch
        if isinstance(batch, (list, tuple)) and batch and all(isinstance(part, (list, tuple)) for part in batch):
            tensors = []  # collate_fn did not stack: a tensor's length is not the number of samples
        self.pending.setdefault(iterator, []).append(self.sample(tensors))
        self.drawn = self.draws()
        if id(iterator._dataset) in self.trained:
            self.begin()
        return batch

    def sample(self, tensors):
        """Return a digest of each sample in a batch."""
        lengths = [len(tensor) for tensor in tensors]
        rows = max(lengths, key=lengths.count, default=0)
        digest = self.torch.zeros(rows, dtype=self.torch.float64, device="cpu")
        for n, tensor in enumerate([tensor for tensor in tensors if len(tensor) == rows > 0], 1):
            flat = tensor.detach().cpu().double().reshape(rows, -1)
            flat = flat.masked_fill(flat == -100, 0)  # mask padded labels with 0, which adds nothing
            digest += flat @ self.waves(flat.shape[1:], flat.device)[n % 2] * n
        return digest.tolist()

    def before_step(self, optimizer, args, more):
        if self.outer not in (None, optimizer):
            return  # an optimizer inside another one, as in ZeroRedundancyOptimizer
        if float(getattr(optimizer, "found_inf", None) or 0):
            return  # GradScaler found infinite gradients: the fused kernel skips this step
        self.outer = optimizer
        trained = [(item, group) for group in optimizer.param_groups for item in group["params"]
                   if item.requires_grad and not item.is_meta]  # meta: in another process
        self.parameters = [item for item, _ in trained]
        self.rates = [[float(group.get("lr") or 0)] for _, group in trained]
        with self.torch.no_grad():
            key = [id(item) for item in self.parameters]
            if self.tables.get(optimizer, [None])[0] != key:
                shapes = [list(item.shape) for item in self.parameters]
                self.tables[optimizer] = key, list(zip(self.look(), shapes, self.digest(self.parameters)))
            closure = len(args) > 1 or more.get("closure")
            scale = getattr(optimizer, "grad_scale", None)  # the fused kernel unscales inside the step
            self.grads = None if closure else self.digest(
                [item.grad if scale is None or item.grad is None else item.grad / scale for item in self.parameters])

    def look(self):
        """Find all modules, and return a name for each parameter."""
        gc.unfreeze()  # gc.get_objects() omits what the program has frozen
        names, modules = {}, [item for item in gc.get_objects() if issubclass(type(item), self.torch.nn.Module)]
        for name, item in (pair for module in modules for pair in module.named_parameters()):
            for wrapper in ("_forward_module.", "_orig_mod.", "_fsdp_wrapped_module.", "module."):
                name = name.replace(wrapper, "")
            names[id(item)] = max(names.get(id(item), ""), name, key=len)
        self.modules = [module for module in modules if not module._modules]
        return [names.get(id(item), "parameter") for item in self.parameters]

    def after_step(self, optimizer, args, more):
        if optimizer is not self.outer:
            return
        torch, self.outer = self.torch, None
        norms, exact = torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm
        self.flags |= {"batchnorm" for item in self.modules
                       if item.training and isinstance(item, norms) and not isinstance(item, exact)}
        with torch.no_grad():
            grads = self.grads or self.digest([item.grad for item in self.parameters])
            table = zip(self.tables[optimizer][1], self.rates, grads, self.digest(self.parameters))
        self.flags |= {str(item.dtype) for item in self.parameters}
        self.write("step", rows=[[*row, *more] for row, *more in table], samples=sum(self.samples, []),
                   batches=len(self.samples), loss=sum(map(float, self.losses)), clips=self.clips, flags=[*self.flags],
                   resting=sum(not item.training for item in self.modules), settings=str(optimizer).splitlines())
        self.clear()
        self.count += 1
        if self.count == self.steps:
            open(f"{self.folder}/done-{self.rank}-of-{self.world}", "w").close()
            while os.path.isdir(self.folder):  # other ranks may still need this one: wait until verify.py ends all
                time.sleep(1)
            os._exit(0)


class Run:
    """What the ranks of one command recorded."""

    def __init__(self, folder, label):
        self.label, self.ranks, self.kinds, self.doubled = label, {}, {}, False
        for rank, path in sorted((int(path.name.split("-")[0]), path) for path in Path(folder).glob("*.jsonl")):
            events = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]  # whole lines
            self.doubled |= rank in self.ranks
            self.ranks[rank] = [event for event in events if event["event"] == "step"]
            self.kinds[rank] = [event["event"] for event in events]
        self.length = min(map(len, self.ranks.values()), default=0)
        self.flags = {flag for steps in self.ranks.values() for step in steps for flag in step["flags"]}

    def at(self, number):
        """Return each rank's record of a step, the distinct rows of all ranks, and all samples, sorted."""
        states = [steps[number] for steps in self.ranks.values()]
        rows = {}
        for state in states[::-1]:  # equal rows on several ranks are one parameter, but on one rank they are several
            seen = []
            for row in state["rows"]:
                rows[str(row[:3]), seen.count(str(row[:3]))] = row
                seen.append(str(row[:3]))
        return states, list(rows.values()), sorted(sample for state in states for sample in state["samples"])

    def join(self, other):
        """Replace equal slices of a tensor on consecutive ranks by the whole tensor, if `other` starts with it."""
        for states, whole in zip(zip(*self.ranks.values()), next(iter(other.ranks.values()))):
            for place, (*slices, target) in enumerate(zip(*[state["rows"] for state in states], whole["rows"])):
                alike = all(row[1] == slices[0][1] for row in slices)  # stages of a pipeline differ
                for axis, (part, total) in enumerate(zip(slices[0][1], target[1]) if alike else ()):
                    count = max(1, total // max(1, part))
                    blocks = [joined(slices[n:n + count], axis) for n in range(0, len(slices), count)]
                    if count > 1 and all(row[1] == target[1] and equal(row[START], target[START]) for row in blocks):
                        for n, state in enumerate(states):
                            state["rows"][place] = blocks[n // count]


def joined(slices, axis):
    """Return the row of a tensor, given the rows of its equal slices along an axis."""
    row, size = [*slices[0]], slices[0][1][axis]
    row[1] = [*row[1][:axis], size * len(slices), *row[1][axis + 1:]]
    for column in (START, GRAD, VALUE):
        wave = sum(complex(*part[column][1:]) * cmath.rect(1, n * size * FREQUENCIES[axis])
                   for n, part in enumerate(slices))
        row[column] = [math.hypot(*[part[column][0] for part in slices]), wave.real, wave.imag]
    return row


def equal(left, right):
    return len(left) == len(right) and all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-6) for pair in zip(left, right))


def match(left, right):
    """Return pairs of rows that belong to the same parameter: by name and shape, by order, or by initial values."""
    named = {str(row[:2]): row for row in right}
    if len(named) == len(left) == len(right) and {str(row[:2]) for row in left} == set(named):
        return [(row, named[str(row[:2])]) for row in left]
    if [row[1] for row in left] == [row[1] for row in right]:
        return list(zip(left, right))
    return [(row, other) for row in left for other in right if row[1] == other[1] and equal(row[START], other[START])]


def worst(pairs, column, floor=1e-6):
    """Return the greatest relative difference of a column's digests, and the name of its parameter."""
    least = floor * math.hypot(*[one[column][0] for one, _ in pairs]) + 1e-300  # anything smaller is rounding error
    found = []
    for one, two in pairs:
        gaps = [0.0 if x == y or x != x and y != y else abs(x - y) for x, y in zip(one[column], two[column])]
        found.append((max(gaps) and max(gaps) / max(one[column][0], two[column][0], least), one[0]))
    return max([(math.inf if math.isnan(value) else value, name) for value, name in found], default=(0.0, None))


def clipped(a, b, left, right):
    """Return how clipping differs between the ranks or the runs, or None."""
    left, right = [state["clips"] for state in left], [state["clips"] for state in right]
    if len(left[0]) != len(right[0]):
        return f"{a.label} clips {len(left[0])} time(s) in this step, {b.label} {len(right[0])}"
    for one, two in [*zip(left[0], left[-1]), *zip(right[0], right[-1])]:
        if not math.isclose(one[0], two[0], rel_tol=1e-6):
            return f"two ranks clip different norms, {one[0]:.4g} and {two[0]:.4g}"
    for one, two in zip(left[0], right[0]):
        if one[1] != two[1] or max(one[0], two[0]) > 100 * min(one[0], two[0]):
            return f"{a.label} clips a norm of {one[0]:.4g} to {one[1]:g}, {b.label} {two[0]:.4g} to {two[1]:g}"
    return None


def explain(a, b, step, column, pairs):
    """Return the likely cause of the first difference between two runs, and the evidence for it."""
    (left, _, ours), (right, _, theirs) = a.at(step), b.at(step)
    for run, other in ((left, theirs), (right, ours)):  # in tensor and pipeline parallelism, each rank reads all
        if len(run) > 1 and other and all(equal(sorted(state["samples"]), other) for state in run):
            ours = theirs = other
    one, two = max(pairs, key=lambda pair: pair[0][GRAD][0])
    k = two[GRAD][0] / (one[GRAD][0] or math.nan)
    scaled = [({GRAD: [k * value for value in one[GRAD]], 0: one[0]}, two) for one, two in pairs]
    proportional = column == GRAD and k > 0 and worst(scaled, GRAD)[0] < 1e-6
    resting = [max(state["resting"] for state in states) for states in (left, right)]
    if column == START:
        return "start", f"{a.label} and {b.label} start with different weights"
    if ours and theirs and len(ours) != len(theirs) and not proportional:
        return "batch-size", f"the step reads {len(ours)} samples in {a.label}, {len(theirs)} in {b.label}"
    if column == RATE:
        rates = next((one[RATE][0], two[RATE][0]) for one, two in pairs if one[RATE] != two[RATE])
        return "learning-rate", f"the rate is {rates[0]:g} in {a.label} and {rates[1]:g} in {b.label}"
    if column == VALUE:
        lines = sorted(line.strip() for line in {*left[0]["settings"]} ^ {*right[0]["settings"]} if "lr:" not in line)
        return "unknown", f"equal gradients, but different updates{': ' * bool(lines)}{', '.join(lines)}"
    if resting[0] != resting[1]:
        return "evaluation", f"{resting[0]} layers of {a.label} are in evaluation mode, {resting[1]} of {b.label}"
    clip, norms = clipped(a, b, left, right), [states[0]["clips"][0][0] if states[0]["clips"] else 0
                                               for states in (left, right)]
    whole = proportional and min(abs(max(k, 1 / k) - n) for n in range(2, 65)) < 1e-4
    if clip and (not whole or math.isclose(*norms, rel_tol=1e-6)):
        return "clip", clip
    if proportional:
        k = norms[1] / norms[0] if all(norms) else k
        layout = f"{len(right)} rank(s) and {right[0]['batches']} micro-batch(es)"
        return "scale", f"the gradients of {b.label} are {k:.6g} times those of {a.label}, with {layout}"
    if ours and theirs and not equal(ours, theirs):
        for run, mine, other in ((b, theirs, a), (a, ours, b)):
            for again in {*range(min(a.length, b.length))} - {step}:
                if equal(run.at(again)[2], mine) and not equal(other.at(again)[2], other.at(step)[2]):
                    return "set-epoch", f"{run.label} reads the same samples in steps {step + 1} and {again + 1}"
        alike = any(equal(sorted(states[0]["samples"]), sorted(state["samples"]))
                    for states in (left, right) for state in states[1:])
        common = len({f"{value:.6g}" for value in ours} & {f"{value:.6g}" for value in theirs})
        return "samples", ("every rank reads the same samples" if alike else
                           f"{common} of the step's {len(ours)} samples are in both runs")
    flags = {flag for state in left + right for flag in state["flags"]}
    losses = [sum(state["loss"] for state in states) / len(states) for states in (left, right)]
    split = (len(left), left[0]["batches"]) != (len(right), right[0]["batches"])
    for cause, fits in (("batchnorm", split and "batchnorm" in flags), ("random", "random" in flags),
                        ("uneven-mean", split and not math.isclose(*losses, rel_tol=1e-9)
                         and max(map(abs, losses)) < 100 * min(map(abs, losses))),  # a larger ratio means a scaled loss
                        ("evaluation", "evaluated" in flags), ("unknown", True)):
        if fits:
            seen = "equal samples" if ours and theirs else "the samples were not seen, so they may differ"
            return cause, f"{seen}; mean loss {losses[0]:.9g} in {a.label}, {losses[1]:.9g} in {b.label}"


def ranks_differ(run, step, columns, limit):
    """If the ranks of a run differ, return the cause, evidence, step, parameter and difference."""
    states = run.at(step)[0]
    for rank, state in zip(run.ranks, states):
        pairs = list(zip(states[0]["rows"], state["rows"]))
        for column in columns if all(one[:2] == two[:2] for one, two in pairs) else ():  # stages of a pipeline differ
            difference, name = worst(pairs, column)
            if difference > limit:
                cause, what = {START: ("start", "initial weights"), RATE: ("rank-lr", "learning rates"),
                               GRAD: ("not-averaged", "gradients"), VALUE: ("unknown", "weights")}[column]
                return cause, f"ranks 0 and {rank} of {run.label} have different {what}", step, name, difference
    return None


def refuse(report, reason, step=None):
    return {**report, "verdict": "not comparable", "cause": None, "step": step, "message": reason}


def compare(folder_a, folder_b, native=False, failed=(None, None), again=False):
    """Compare the records of two commands, or of one that ran again; `failed` holds what record() returned for each."""
    a, b = Run(folder_a, "A"), Run(folder_b, "B")
    sixteen = {"torch.float16", "torch.bfloat16"} & (a.flags | b.flags)
    low, high = ((0.05, 0.5) if sixteen else (1e-4, 0.1)) if native else (1e-9, 1e-4)
    report = {"verdict": "same", "cause": None, "step": None, "parameter": None, "difference": 0.0, "message": "",
              "precision": "own" if native else "float64", "steps": [a.length, b.length],
              "ranks": [len(a.ranks), len(b.ranks)], "series": [],
              "dtypes": sorted(flag for flag in a.flags | b.flags if flag.startswith("torch."))}

    def different(cause, fact, step, parameter=None, difference=None):
        return {**report, "verdict": "different", "cause": cause, "step": step + 1, "parameter": parameter,
                "difference": difference, "message": f"{fact}: {REMEDIES[cause]}"}

    for run in (a, b):
        if not any(run.ranks.values()) or run.doubled:
            reason = "restarted, or its processes did not join one group" if run.doubled else "took no optimizer step"
            return refuse(report, f"command {run.label} {reason}")
    a.join(b)
    b.join(a)
    answer = None
    for step in range(min(a.length, b.length)):
        limit, columns = min(max(low, 1000 * report["difference"]), high), (START, RATE, GRAD, VALUE)[step > 0:]
        rows, others = a.at(step)[1], b.at(step)[1]
        pairs = match(rows, others)
        floor = 1e-6 if not native else 0.2 if sixteen else 1e-2  # the gradient of a bias before BatchNorm is noise
        total = math.hypot(*[one[GRAD][0] for one, _ in pairs])
        moved = [pair for pair in pairs if not max(pair[0][GRAD][0], pair[1][GRAD][0]) <= floor * total]
        found = [(column, *worst(moved if native and column == VALUE else pairs, column,
                                 floor if column == GRAD else 1e-6)) for column in columns]
        report["series"].append(max(item[1] for item in found))
        for run in () if again else (a, b):
            answer = answer or ranks_differ(run, step, columns, limit)
        if not answer and not len(pairs) == len(rows) == len(others):
            fact = f"A trains {len(rows)} tensors and B {len(others)}, of which {len(pairs)} match"
            answer = "unknown", fact, step, None, None
        for column, difference, name in found:
            if not answer and difference > limit:
                answer = (*explain(a, b, step, column, pairs), step, name, difference)
        report["difference"] = max(report["series"])
        if not answer and all(any(not math.isfinite(row[VALUE][0]) for row in part) for part in (rows, others)):
            return refuse(report, f"both models hold NaN or infinity after step {step + 1}")
    if answer:
        return different(*answer)
    for run, text in zip((a, b), failed):
        if "still training" in (text or ""):
            continue
        counts = {rank: kinds.count("begin" if text else "step") for rank, kinds in run.kinds.items()}
        behind = [rank for rank, count in counts.items() if count < max(counts.values())]
        if behind and not any("failed" in run.kinds[rank] for rank in behind):
            return different("rank-stops", f"the ranks of {run.label} take {[*counts.values()]} steps", run.length)
    if a.length != b.length and not any(failed):
        return different("batch-size", f"A takes {a.length} steps and B {b.length}", min(a.length, b.length))
    bound = f" (tolerance {low:g} at first, {high:g} later)" * native
    return {**report, "message": f"{a.length} steps, greatest relative difference {report['difference']:.1e}{bound}"}


def record(command, folder, timeout, **options):
    """Run a command until it ends, takes its last step or exceeds the timeout; return None or what went wrong."""
    env = {**os.environ, **environment(folder, **options)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    end, code = time.monotonic() + timeout, None
    with open(folder / "output", "w+") as output:
        try:
            process = subprocess.Popen(shlex.split(command), env=env, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=output, start_new_session=True)
        except OSError as error:
            return str(error)
        try:
            while code is None and time.monotonic() < end:
                done = [path.name for path in folder.glob("done-*")]
                code = 0 if done and len(done) == int(done[0].split("-")[-1]) else process.poll()
                time.sleep(0.05)
        finally:
            stop(process, folder)
    said = (folder / "output").read_text(errors="replace").splitlines()[-15:]
    quiet = time.time() - max((path.stat().st_mtime for path in folder.glob("*.jsonl")), default=0.0)
    busy = ", still training: raise --timeout or pass --steps" if quiet < min(60, timeout / 4) else ""
    why = f"exit code {code}" if code else f"did not end within {timeout:g} s{busy}"
    return None if code == 0 else "\n".join([why, *said])


def stop(process, folder):
    """Kill a command and, on Linux, every process that it started: the folder is in their environment."""
    process.kill()
    found = True
    while found:
        found = False
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{folder.resolve()}/site".encode() in entry.read_bytes():
                    os.kill(int(entry.parent.name), 9)
                    found = True
            except OSError:
                continue
    process.wait()


def verify(commands, folder, steps=0, timeout=600.0, twice=False):
    """Run two commands, if needed again in their own precision, and return the report."""
    def run(commands, native, steps):
        folders = [Path(tempfile.mkdtemp(dir=folder)) for _ in commands]
        return folders, [record(*pair, timeout, native=native, steps=steps) for pair in zip(commands, folders)]

    folders, failed = run(commands, False, steps)
    report = compare(*folders, failed=failed)
    differs = report["verdict"] == "different"
    broken = any(failed) and not differs and "did not end" not in str(failed)
    exact = report["cause"] in ("learning-rate", "rank-lr") or "equal gradients" in report["message"]
    low = differs and (report["difference"] or 1) < 1e-5 and not exact
    if {*report["dtypes"]} - {"torch.float64"} or broken or low:
        folders, failed = run(commands, True, steps)
        report = compare(*folders, True, failed)
    for label, text in zip("AB", failed):
        if text and report["verdict"] != "different":
            return refuse(report, f"command {label} failed: {text}")
    if twice or report["cause"] in ("start", "samples", "random", "unknown"):
        native = report["precision"] != "float64"
        again, _ = run(commands[:1], native, report["step"] or steps)
        own = compare(folders[0], *again, native, again=True)
        if own["parameter"]:
            return refuse(report, f"two runs of command A differ at step {own['step']}: set its seeds", own["step"])
    return report


def plot(values, path):
    """Draw the difference at each step on a logarithmic scale."""
    logs = [math.log10(min(max(value, 1e-17), 1e2)) for value in values]
    points = " ".join(f"{60 + 620 * n / max(len(logs) - 1, 1):.1f},{50 - 15 * log:.1f}" for n, log in enumerate(logs))
    lines = "".join(f'<path d="M60 {50 - 15 * power}h620" stroke="#ddd"/><text x="20" y="{54 - 15 * power}">1e{power}'
                    '</text>' for power in range(-16, 3, 3))
    Path(path).write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 330" font-family="sans-serif" font-size="12">'
        f'<rect width="700" height="330" fill="#fff"/>{lines}<polyline points="{points}" fill="none" stroke="#06c"/>'
        f'<text x="270" y="322">greatest relative difference, steps 1 to {len(logs)}</text></svg>\n')


def main():
    parser = argparse.ArgumentParser(description="Check whether two commands train the same model.",
                                     epilog="exit code: 0 same, 1 different, 2 not comparable")
    parser.add_argument("commands", nargs=2, metavar="COMMAND", type=shlex.split, help="a command, in quotes")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="stop both after N optimizer steps")
    parser.add_argument("--twice", action="store_true", help="check that the first command is reproducible")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for each run (default: 600)")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the difference at each step")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.error = lambda message: parser.exit(2, f"verify.py: {message}; see --help\n")
    args = parser.parse_args()
    for path in filter(None, (args.plot, args.json)):
        if not Path(path).resolve().parent.is_dir():
            parser.error(f"{path}: the folder does not exist")
    if not all(args.commands):
        parser.error("a command is empty")
    commands = [shlex.join(words) for words in args.commands]
    for name in ("SIGTERM", "SIGHUP"):  # exit through finally, which stops the commands; nohup ignores SIGHUP
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        report = verify(commands, folder, args.steps, args.timeout, args.twice)
    values = report.pop("series")
    for label, command, ranks, steps in zip("AB", commands, report["ranks"], report["steps"]):
        print(f"{label}: {command}\n   {ranks} rank(s), {steps} steps, {report['precision']} precision")
    if report["verdict"] == "different":
        where = [f"step {report['step']}", report["parameter"], f"by {report['difference'] or 0:.1e}"]
        print(f"different: {', '.join(where[:3 if where[1] else 1])}\ncause: {report['cause']}: {report['message']}")
    else:
        print(f"{report['verdict']}: {report['message']}")
    if args.plot:
        plot(values, args.plot)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return {"same": 0, "different": 1, "not comparable": 2}[report["verdict"]]


if __name__ == "__main__":
    sys.exit(main())
