"""Run two commands that train with torch, and say whether they train the same model.

    python verify.py "python train.py --epochs 2" "torchrun --nproc-per-node=2 train_DDP.py --epochs 2"

The programs need no change, and this file needs only torch: copy it anywhere. Exit code 0: the same model. Exit code
1: different; the output names the first step and parameter that differ, and the likely cause. Exit code 2: not
comparable, or wrong usage.

A hook acts in every Python process that imports torch. It makes float64 the default type and replaces float32 in
batches and casts. Two correct programs then differ by 1e-15, and autocast and loss scaling round nothing. For each
optimizer step and rank, the hook records the learning rates, and digests of all parameters, gradients and samples.

A relative difference counts if it exceeds 1e-9 and 1000 times all earlier ones, or if it exceeds 1e-4: rounding
errors grow slowly, a mistake shows at once. A program that fails in float64, or still computes in less, runs again in
its own precision, with the numbers 1e-4, 1000 and 0.1 (16 bits: 0.05, 1000 and 0.5). If chance can be the cause,
command A runs again.

Both commands must start from scratch with fixed seeds, and must not read what the other one wrote. The hook does not
see optimizers that do not derive from torch.optim.Optimizer, steps in a CUDA graph, buffers, what follows the last
step, or `python -E`, `-I` and `-S`. It compares samples only if they come from DataLoader. It gathers DTensors, and
matches pipeline stages by their initial weights, but not the flat parameters of FSDP1 or shards cut by hand. No rank
may restart. The cause is a well-founded guess.
"""
import argparse
import functools
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
            sys.meta_path.insert(0, self)  # some libraries only look whether there is a torch
            return spec
sys.meta_path.insert(0, OnTorch())
path = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", path):  # another one, further along the path
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
REMEDIES = {
    "start": "set the same seed on every rank before you create the model, and wrap the model in DDP",
    "not-averaged": "call the DDP wrapper, not the model in it; leave no_sync() for the last micro-batch (pitfall P12)",
    "rank-lr": "call scheduler.step() on every rank, with a metric that is reduced over all ranks (pitfall P15)",
    "set-epoch": "call sampler.set_epoch(epoch) at the start of every epoch (pitfall D1)",
    "scale": "average over ranks instead of summing; divide the loss of a micro-batch by their number (pitfall P5)",
    "learning-rate": "compare the learning rate, its scaling with the batch size, and the scheduler (pitfall D6)",
    "batch-size": "divide the batch by the number of processes; compare drop_last and epochs (pitfall D6)",
    "samples": "give each rank its share with DistributedSampler; compare seed, shuffle and drop_last; let random "
               "augmentation depend on (seed, epoch, index) (pitfall D3)",
    "evaluation": "call model.eval() before an evaluation and model.train() after it (pitfall E1)",
    "batchnorm": "BatchNorm normalizes the share of each process: use SyncBatchNorm, or accept the difference",
    "uneven-mean": "divide the sum of the losses by the count over all ranks, not by each rank's own count",
    "rank-stops": "let all ranks decide from the same reduced value when to stop (pitfall P14)",
    "clip": "clip once per step, after the gradients are averaged and unscaled (pitfall P6)",
    "random": "set dropout to 0 to compare the rest; let draws depend on the sample, not on the rank (pitfall D3)",
    "unknown": "no known pattern; compare what the two programs do in this step"}
START, RATE, GRAD, VALUE = 2, 3, 4, 5  # digests in the row of a parameter, after its name and its shape


def environment(folder, native=False, steps=0):
    """Return the environment variables with which a command records its steps in `folder`."""
    site = Path(folder).resolve() / "site"
    site.mkdir(parents=True)
    options = {"folder": str(site.parent), "native": native, "steps": steps}
    (site / "sitecustomize.py").write_text(SITE.format(file=os.path.abspath(__file__), options=options))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}


class Recorder:
    """Lives in a process of a command, and writes a line of JSON for each optimizer step."""

    def __init__(self, folder, native, steps):
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.torch, self.folder, self.native, self.steps = torch, folder, native, steps
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        self.patch(torch.autograd, "backward", self.backward)
        self.patch(torch.autocast, "__enter__", self.autocast)
        self.patch(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", self.deliver)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self.patch(torch.nn.utils, name, self.clip)
        if not native:
            torch.set_default_dtype(torch.float64)
            self.patch(torch.Tensor, "float", self.double)
            for owner, name in ((torch.Tensor, "to"), (torch, "tensor"), (torch.nn.functional, "softmax")):
                self.patch(owner, name, self.widen)

    def patch(self, owner, name, around):
        """Replace a function by one that calls around(function, ...)."""
        function = getattr(owner, name)
        setattr(owner, name, functools.wraps(function)(lambda *args, **more: around(function, *args, **more)))

    def double(self, function, tensor, **more):
        inside = sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"  # it needs float32
        return function(tensor, **more) if inside else tensor.double(**more)

    def widen(self, function, *args, **more):
        wide = {id(self.torch.float32): self.torch.float64}
        more = {name: wide.get(id(value), value) for name, value in more.items()}
        return function(*[wide.get(id(value), value) for value in args], **more)

    def forget(self):
        """Begin as a new process does."""
        self.file, self.count, self.outer = None, 0, None
        self.optimizers, self.tables, self.trained = {}, {}, set()
        self.pending = weakref.WeakKeyDictionary()  # iterator of a DataLoader: batches that no backward pass followed
        self.clear()

    def clear(self):
        self.samples, self.losses, self.clips, self.flags, self.begun = [], [], [], set(), False
        self.drawn = self.draws()

    def draws(self):
        """Return the states of the random generators: they tell whether the model draws, as dropout does."""
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

    def digest(self, tensors):
        """Return the norm and two projections of each tensor; a gradient of None is zero."""
        found = []
        for tensor in tensors:
            tensor = self.torch.zeros(1) if tensor is None else tensor.detach()
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            tensor = tensor.cpu() if tensor.device.type == "mps" else tensor  # it has no float64
            flat = (tensor.to_dense() if tensor.layout != self.torch.strided else tensor).double().flatten()
            found.append(self.torch.cat([flat.norm()[None], self.waves(len(flat), flat.device) @ flat]))
        alike = len({item.device for item in found}) < 2
        return self.torch.stack(found if alike else [item.cpu() for item in found]).tolist() if found else []

    @functools.cache  # noqa: B019
    def waves(self, size, device):
        n = self.torch.arange(1, size + 1, dtype=self.torch.float64, device=device) ** 2
        return self.torch.stack([n.cos(), (0.7 * n).cos()])

    def autocast(self, function, context):
        self.flags |= {"torch.bfloat16"} if context._enabled and self.native else set()  # float64 is not cast
        return function(context)

    def clip(self, function, parameters, *args, **more):
        norm = function(parameters, *args, **more)
        bound = args[0] if args else more.get("max_norm", more.get("clip_value"))
        self.clips.append([float(getattr(norm, "full_tensor", lambda: norm or 0)()), float(bound)])
        return norm

    def backward(self, function, tensors, *args, **more):
        for loss in [tensors] if isinstance(tensors, self.torch.Tensor) else tensors:
            if not isinstance(loss, self.torch.Tensor):  # the output of a pipeline stage: its loss is elsewhere
                continue
            self.losses.append((loss.cpu() if loss.device.type == "mps" else loss).detach().double().sum())
            self.flags.add(str(loss.dtype))
        self.flags |= {"random"} if self.drawn != self.draws() else set()
        self.begin()
        for iterator, batches in self.pending.items():
            self.trained.add(id(iterator._dataset))
            self.samples += batches
            batches.clear()
        return function(tensors, *args, **more)

    def begin(self):
        """Note that this rank works on a step: if it never ends, another rank has left."""
        if not self.begun:
            self.begun = True
            self.write("begin")

    def deliver(self, function, iterator):
        """Note the samples of a batch that DataLoader delivers, and return it in float64."""
        torch, tensors = self.torch, []

        def visit(value):
            if isinstance(value, torch.Tensor):
                value = value.double() if value.is_floating_point() and not self.native else value
                tensors.extend([value] * (value.ndim > 0))
            elif isinstance(getattr(value, "data", None), dict):  # UserDict: BatchEncoding of transformers
                value.data = torch.utils._pytree.tree_map(visit, value.data)
            return value

        try:
            batch = torch.utils._pytree.tree_map(visit, function(iterator))
        except StopIteration:
            self.flags |= {"evaluated"} if self.pending.pop(iterator, None) else set()  # read, but not trained on
            raise
        except Exception:
            self.write("failed")
            raise
        if not torch.is_grad_enabled():
            self.flags.add("evaluated")
            return batch
        rows = max([len(tensor) for tensor in tensors], key=[len(tensor) for tensor in tensors].count, default=0)
        if isinstance(batch, (list, tuple)) and batch and all(isinstance(part, (list, tuple)) for part in batch):
            rows = 0  # a collate_fn that stacks nothing: a tensor's length is not the number of samples
        digest = torch.zeros(rows, dtype=torch.float64, device="cpu")
        for n, tensor in enumerate([tensor for tensor in tensors if len(tensor) == rows > 0], 1):
            flat = tensor.detach().cpu().double().reshape(rows, -1)
            flat = flat.masked_fill(flat == -100, 0)  # padding must not count, and zeros do not
            digest += flat @ self.waves(flat.shape[1], flat.device)[n % 2] * n
        self.pending.setdefault(iterator, []).append(digest.tolist())
        self.drawn = self.draws()
        if id(iterator._dataset) in self.trained:
            self.begin()
        return batch

    def before_step(self, optimizer, args, more):
        if self.outer not in (None, optimizer):
            return  # an optimizer inside another one, as in ZeroRedundancyOptimizer
        if float(getattr(optimizer, "found_inf", None) or 0):
            return  # a fused kernel skips this step of a GradScaler
        self.outer = optimizer
        self.number, _ = self.optimizers.setdefault(id(optimizer), (len(self.optimizers), optimizer))
        pairs = [(item, [float(group.get("lr") or 0)]) for group in optimizer.param_groups for item in group["params"]
                 if not item.is_meta]  # in another process
        self.parameters = [item for item, _ in pairs if item.requires_grad]
        self.rates = [rate for item, rate in pairs if item.requires_grad]
        with self.torch.no_grad():
            key = [id(item) for item in self.parameters]
            if self.tables.get(self.number, [None])[0] != key:
                shapes = [list(item.shape) for item in self.parameters]
                self.tables[self.number] = key, list(zip(self.look(), shapes, self.digest(self.parameters)))
            closure = len(args) > 1 or more.get("closure")
            scale = getattr(optimizer, "grad_scale", None)  # a fused kernel unscales by itself
            self.grads = None if closure else self.digest(
                [item.grad if scale is None or item.grad is None else item.grad / scale for item in self.parameters])

    def look(self):
        """Find all modules, and return a name for each parameter."""
        import gc

        gc.unfreeze()  # a program may have taken its model out of collection, and get_objects() leaves it out then
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
        normal = [item for item in self.modules if isinstance(item, torch.nn.modules.batchnorm._BatchNorm)]
        if any(item.training and not isinstance(item, torch.nn.SyncBatchNorm) for item in normal):
            self.flags.add("batchnorm")
        with torch.no_grad():
            grads = self.grads or self.digest([item.grad for item in self.parameters])
            table = zip(self.tables[self.number][1], self.rates, grads, self.digest(self.parameters))
        self.flags |= {str(item.dtype) for item in self.parameters}
        self.write("step", rows=[[*row, *more] for row, *more in table], samples=sum(self.samples, []),
                   batches=len(self.samples), loss=sum(map(float, self.losses)), clips=self.clips, flags=[*self.flags],
                   resting=sum(not item.training for item in self.modules), settings=str(optimizer).splitlines())
        self.clear()
        self.count += 1
        if self.count == self.steps:
            open(f"{self.folder}/done-{self.rank}-of-{self.world}", "w").close()
            while os.path.isdir(self.folder):  # other ranks may still need this one: verify.py ends them together
                time.sleep(1)
            os._exit(0)


class Run:
    """What the ranks of one command recorded."""

    def __init__(self, folder, label):
        self.label, self.ranks, self.kinds, self.doubled = label, {}, {}, False
        for path in sorted(Path(folder).glob("*.jsonl"), key=lambda path: int(path.name.split("-")[0])):
            rank = int(path.name.split("-")[0])
            events = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]  # a whole one
            self.doubled |= rank in self.ranks
            self.ranks[rank] = [event for event in events if event["event"] == "step"]
            self.kinds[rank] = [event["event"] for event in events]
        self.length = min(map(len, self.ranks.values()), default=0)
        self.flags = {flag for steps in self.ranks.values() for step in steps for flag in step["flags"]}

    def at(self, number):
        """Return each rank's step, the distinct rows of all ranks, and all samples, sorted."""
        states = [steps[number] for steps in self.ranks.values()]
        rows = {}
        for state in states[::-1]:  # equal rows of several ranks are one parameter, those of one rank are not
            seen = []
            for row in state["rows"]:
                rows[str(row[:3]), seen.count(str(row[:3]))] = row
                seen.append(str(row[:3]))
        return states, list(rows.values()), sorted(sample for state in states for sample in state["samples"])


def equal(left, right):
    return len(left) == len(right) and all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-6) for pair in zip(left, right))


def match(left, right):
    """Return the pairs of rows of the same parameter: by name and shape, else by order, else by initial values."""
    named = {str(row[:2]): row for row in right}
    if len(named) == len(left) == len(right) and {str(row[:2]) for row in left} == set(named):
        return [(row, named[str(row[:2])]) for row in left]
    if [row[1] for row in left] == [row[1] for row in right]:
        return list(zip(left, right))
    return [(row, other) for row in left for other in right if row[1] == other[1] and equal(row[START], other[START])]


def worst(pairs, column, floor=1e-6):
    """Return the greatest relative difference of a column's digests, and the name of its parameter."""
    least = floor * math.hypot(*[one[column][0] for one, _ in pairs]) + 1e-300  # smaller ones are only rounding
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
            return f"{a.label} clips a norm of {one[0]:.4g} at {one[1]:g}, {b.label} one of {two[0]:.4g} at {two[1]:g}"
    return None


def explain(a, b, step, column, pairs):
    """Return the likely cause of the first difference between two runs, and the evidence for it."""
    (left, _, ours), (right, _, theirs) = a.at(step), b.at(step)
    for run, other in ((left, theirs), (right, ours)):  # tensor and pipeline parallel: every rank reads the whole batch
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
        return "learning-rate", f"it is {rates[0]:g} in {a.label} and {rates[1]:g} in {b.label}"
    if column == VALUE:
        lines = sorted(line.strip() for line in {*left[0]["settings"]} ^ {*right[0]["settings"]} if "lr:" not in line)
        return "unknown", f"equal gradients, another update{': ' * bool(lines)}{', '.join(lines)}"
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
                         and max(map(abs, losses)) < 100 * min(map(abs, losses))),  # more is a scaled loss
                        ("evaluation", "evaluated" in flags), ("unknown", True)):
        if fits:
            seen = "equal samples" if ours and theirs else "no samples from DataLoader, so they may differ"
            return cause, f"{seen}; mean loss {losses[0]:.9g} in {a.label}, {losses[1]:.9g} in {b.label}"


def ranks_differ(run, step, columns, limit):
    """Return the cause, evidence, step, parameter and difference if the ranks of a run differ, else None."""
    states = run.at(step)[0]
    for rank, state in zip(run.ranks, states):
        pairs = list(zip(states[0]["rows"], state["rows"]))
        for column in columns if all(one[:2] == two[:2] for one, two in pairs) else ():  # not for pipeline stages
            difference, name = worst(pairs, column)
            if difference > limit:
                cause, what = {START: ("start", "initial weights"), RATE: ("rank-lr", "learning rates"),
                               GRAD: ("not-averaged", "gradients"), VALUE: ("unknown", "weights")}[column]
                return cause, f"ranks 0 and {rank} of {run.label} have different {what}", step, name, difference
    return None


def compare(folder_a, folder_b, native=False, failed=(None, None)):
    """Compare what two commands recorded, and return the report; `failed` is what record() said of them."""
    a, b = Run(folder_a, "A"), Run(folder_b, "B")
    sixteen = {"torch.float16", "torch.bfloat16"} & (a.flags | b.flags)
    low, high = ((0.05, 0.5) if sixteen else (1e-4, 0.1)) if native else (1e-9, 1e-4)
    report = {"verdict": "same", "cause": None, "step": None, "parameter": None, "difference": 0.0, "message": "",
              "precision": "own" if native else "float64", "steps": [a.length, b.length],
              "ranks": [len(a.ranks), len(b.ranks)], "series": []}

    def different(cause, fact, step, parameter=None, difference=None):
        return {**report, "verdict": "different", "cause": cause, "step": step + 1, "parameter": parameter,
                "difference": difference, "message": f"{fact}: {REMEDIES[cause]}"}

    for run in (a, b):
        if not any(run.ranks.values()) or run.doubled:
            reason = "restarted, or its processes form no group" if run.doubled else "took no optimizer step"
            return {**report, "verdict": "not comparable", "message": f"command {run.label} {reason}"}
    answer = None
    for step in range(min(a.length, b.length)):
        limit, columns = min(max(low, 1000 * report["difference"]), high), (START, RATE, GRAD, VALUE)[step > 0:]
        rows, others = a.at(step)[1], b.at(step)[1]
        pairs = match(rows, others)
        floor = 1e-6 if not native else 0.2 if sixteen else 1e-2  # a true gradient of zero is noise: bias + BatchNorm
        total = math.hypot(*[one[GRAD][0] for one, _ in pairs])
        moved = [pair for pair in pairs if not max(pair[0][GRAD][0], pair[1][GRAD][0]) <= floor * total]
        found = [(column, *worst(moved if native and column == VALUE else pairs, column,
                                 floor if column == GRAD else 1e-6)) for column in columns]
        report["series"].append(max(item[1] for item in found))
        answer = answer or ranks_differ(a, step, columns, limit) or ranks_differ(b, step, columns, limit)
        if not answer and not len(pairs) == len(rows) == len(others):
            fact = f"A trains {len(rows)} tensors and B {len(others)}, {len(pairs)} of them alike"
            answer = "unknown", fact, step, None, None
        for column, difference, name in found:
            if not answer and difference > limit:
                answer = (*explain(a, b, step, column, pairs), step, name, difference)
        report["difference"] = max(report["series"])
        if not answer and all(any(not math.isfinite(row[VALUE][0]) for row in part) for part in (rows, others)):
            return {**report, "verdict": "not comparable", "message": f"neither model is finite after step {step + 1}"}
    if answer:
        return different(*answer)
    for run, text in zip((a, b), failed):
        if "still training" in (text or ""):
            continue
        counts = {rank: kinds.count("begin" if text else "step") for rank, kinds in run.kinds.items()}
        behind = [rank for rank, count in counts.items() if count < max(counts.values())]
        if behind and not any("failed" in run.kinds[rank] for rank in behind):
            return different("rank-stops", f"the ranks of {run.label} began {[*counts.values()]} steps", run.length)
    if a.length != b.length and not any(failed):
        return different("batch-size", f"A takes {a.length} steps and B {b.length}", min(a.length, b.length))
    bound = f" (tolerance {low:g} at first, {high:g} later)" * native
    return {**report, "message": f"{a.length} steps, greatest relative difference {report['difference']:.1e}{bound}"}


def record(command, folder, timeout, **options):
    """Run a command until it ends, takes its last step or runs out of time; return None or what went wrong."""
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
    why = f"exit code {code}" if code else f"not at an end after {timeout:g} s{busy}"
    return None if code == 0 else "\n".join([why, *said])


def stop(process, folder):
    """Kill a command and, on Linux, all that it started: every process with the folder in its environment."""
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
    """Run two commands, where needed again in their own precision, and return the report."""
    number = iter(range(100))

    def run(commands, native, steps):
        folders = [Path(folder) / str(next(number)) for _ in commands]
        return folders, [record(*pair, timeout, native=native, steps=steps) for pair in zip(commands, folders)]

    folders, failed = run(commands, False, steps)
    report = compare(*folders, failed=failed)
    differs = report["verdict"] == "different"
    flags = {flag for path in folders for flag in Run(path, "").flags if flag.startswith("torch.")}
    broken = any(failed) and not differs and "not at an end" not in str(failed)
    exact = report["cause"] in ("learning-rate", "rank-lr") or "equal gradients" in report["message"]
    if flags - {"torch.float64"} or broken or differs and (report["difference"] or 1) < 1e-5 and not exact:
        folders, failed = run(commands, True, steps)
        report = compare(*folders, True, failed)
    for label, text in zip("AB", failed):
        if text and report["verdict"] != "different":
            return {**report, "verdict": "not comparable", "message": f"command {label} failed: {text}"}
    if twice or report["cause"] in ("start", "samples", "random", "unknown"):
        native = report["precision"] != "float64"
        again, _ = run(commands[:1], native, report["step"] or steps)
        own = compare(folders[0], *again, native)
        if own["parameter"]:
            fact = f"command A differs from itself at step {own['step']} when it runs twice: set its seeds"
            return {**report, "verdict": "not comparable", "cause": None, "step": own["step"], "message": fact}
    return report


def plot(values, path):
    """Draw the difference per step on a logarithmic scale."""
    logs = [math.log10(min(max(value, 1e-17), 1e2)) for value in values]
    points = " ".join(f"{60 + 620 * n / max(len(logs) - 1, 1):.1f},{50 - 15 * log:.1f}" for n, log in enumerate(logs))
    lines = "".join(f'<path d="M60 {50 - 15 * power}h620" stroke="#ddd"/><text x="20" y="{54 - 15 * power}">1e{power}'
                    '</text>' for power in range(-16, 3, 3))
    Path(path).write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 330" font-family="sans-serif" font-size="12">'
        f'<rect width="700" height="330" fill="#fff"/>{lines}<polyline points="{points}" fill="none" stroke="#06c"/>'
        f'<text x="270" y="322">greatest relative difference, steps 1 to {len(logs)}</text></svg>\n')


def main():
    parser = argparse.ArgumentParser(description="Do two commands train the same model?",
                                     epilog="exit code: 0 same, 1 different, 2 not comparable")
    parser.add_argument("commands", nargs=2, metavar="COMMAND", type=shlex.split, help="a command, in quotes")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="end both after N optimizer steps")
    parser.add_argument("--twice", action="store_true", help="run the first command twice")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one run (default: 600)")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the difference per step")
    parser.add_argument("--json", metavar="FILE", help="write the report")
    parser.error = lambda message: parser.exit(2, f"verify.py: {message}; see --help\n")
    args = parser.parse_args()
    for path in filter(None, (args.plot, args.json)):
        if not Path(path).resolve().parent.is_dir():
            parser.error(f"{path}: there is no such folder")
    if not all(args.commands):
        parser.error("a command is empty")
    commands = [shlex.join(words) for words in args.commands]
    for name in ("SIGTERM", "SIGHUP"):  # end what verify.py has started; nohup ignores SIGHUP
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
