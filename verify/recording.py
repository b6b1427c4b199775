"""The recorder, which runs inside the programs that are compared and needs only torch.

The recorder writes one line of JSON for each event: "begin" (a rank has begun a step), "step", "joined" (another
optimizer has stepped after the same backward pass), "last" (all steps to be recorded have ended), "epoch" (the
DataLoader of training data has delivered its last batch), "saved" (a file of a checkpoint has changed), "end" (the
program has ended) or "failed". An optimizer's first step follows its "parameters": name, shape, initial digest and Part
of each one. A step follows "rows", which are long: for each parameter, learning rate, digests of the gradient and of
the new value, REACHED, number of the group, and the digest of the gradient after the last backward pass or null;
`options` of each group; `unoptimized`: the tensors that no optimizer changes, which are buffers, averages of the
weights, and weights if the optimizers hold none; and `states`: what the optimizer keeps for each parameter.
"""
import contextlib
import functools
import json
import os
import sys
import time
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import precision
from .digests import dense, digest, find_parts, marks
from .draws import Draws
from .modules import Modules, tensors_of
from .records import ELSEWHERE, QUIET
from .samples import Samples, counts_of, weight_of

COLLECTIVES = ("all_reduce all_gather all_gather_into_tensor all_to_all all_to_all_single broadcast gather reduce "
               "reduce_scatter reduce_scatter_tensor scatter").split()
CRITERIA = ("binary_cross_entropy binary_cross_entropy_with_logits cross_entropy ctc_loss gaussian_nll_loss huber_loss "
            "kl_div l1_loss mse_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss").split()
CLASS_WEIGHTS = {"binary_cross_entropy_with_logits": "pos_weight", "cross_entropy": "weight", "nll_loss": "weight"}
MISSING, UNREACHED, REACHED = range(3)  # a gradient that is None; that autograd has not reached in this step; others
PROBES = 4  # how many of an optimizer's parameters to compare before its step, too: the smallest ones


class Recorder:
    """Runs in each process of a command, and writes a line of JSON for each optimizer step."""

    def __init__(self, folder, native=False, steps=0, outputs_at=0, whole=None, resting=(), saves=()):
        """Record up to `steps` steps (0: all) in `folder`; in step `outputs_at`, also module outputs and random draws.

        `whole` is the folder of the other command, if that command has ended. The tensors of this command may be parts
        of the tensors recorded there.
        A module whose class name contains one of the words in `resting` stays in evaluation mode.
        With `saves`, the paths to which the program writes its checkpoints, also record when they change, and what else
        a checkpoint must restore. `steps` is then where verify kills the program or sends a signal.
        """
        self.folder, self.native, self.steps = folder, native, steps
        self.outputs_at, self.resting, self.saves, other = outputs_at, resting, saves, f"{whole}/marks"
        self.wholes = [*map(json.loads, open(other))] if os.path.exists(other) else []
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)
        register_optimizer_step_pre_hook(self.before_hooks)
        register_optimizer_step_post_hook(self.after_step)
        loaders = torch.utils.data.dataloader._BaseDataLoaderIter
        patches = [(self.backward, torch.autograd, "backward"), (self.grad, torch.autograd, "grad"),
                   (self.autocast, torch.autocast, "__enter__"),
                   (self.deliver, loaders, "__next__"), (self.index, loaders, "_next_index"),
                   (self.clip, torch.nn.utils, "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"),
                   (self.criterion, torch.nn.functional, *CRITERIA),
                   (self.add_group, torch.optim.Optimizer, "add_param_group"), (self.call, torch.nn.Module, "__call__"),
                   (self.collective, torch.distributed, *COLLECTIVES * torch.distributed.is_available())]
        patches += [] if native else precision.patches(lambda: self.outer)
        for around, owner, *names in patches:
            for name in names:
                setattr(owner, name, self.wrap(getattr(owner, name), around))

    def wrap(self, function, around):
        return functools.wraps(function)(lambda *args, **more: around(function, *args, **more))

    def forget(self):
        """Reset all state, as in a new process."""
        self.file, self.count, self.outer, self.depth, self.parameters = None, 0, None, 0, []
        self.tables, self.optimized, self.reached, self.stale = {}, set(), set(), {}
        self.hooked = weakref.WeakValueDictionary()  # {ID: parameter of an optimizer}
        self.last_hooks = weakref.WeakKeyDictionary()  # {optimizer: handle of the hook that calls before_step()}
        self.owners, self.optimizers = {}, {}  # {ID of such a parameter, or of an optimizer: number of the optimizer}
        self.draws, self.modules, self.samples = Draws(), Modules(), Samples(self.write)
        self.files, self.restored = {}, ([], {})
        self.passes = {}  # {optimizer that has stepped: how many backward passes since}
        self.last = self.loss = None  # the last optimizer that has stepped; the last loss
        self.touched = False  # whether the last backward pass has reached a parameter
        self.computed = {}  # the gradients after the last backward pass, if shows()
        self.joins, self.stepped = False, []  # the optimizers that have stepped since the last backward pass
        self.clear()

    def clear(self):
        self.losses, self.clips, self.flags, self.begun, self.backwards = [], [], set(), False, 0
        self.samples.batches, self.samples.evaluated, self.samples.calls = [], False, []
        self.draws.sites, self.modules.passed, self.modules.outputs = [], [], []
        self.counted, self.counts = [], []  # of the targets of losses: since the last backward pass; of each pass
        self.weights = []  # those of classes in losses: [what, digest]
        self.reached_by = []  # for each backward pass, the numbers of the optimizers whose parameters it has reached
        self.graphs = 0  # how many gradients were computed with create_graph=True, such as those of a penalty
        self.taken = [], [], {}  # by torch.autograd.grad: of the optimizers' parameters: losses, counts, gradients
        self.lost = []  # where a collective without a backward pass took a tensor that needs a gradient
        self.draws.showing = False
        self.modules.places, self.modules.divisors, self.modules.operands, self.modules.computed = {}, [], [], {}
        if self.shows():
            self.draws.show()
            torch.autograd.set_detect_anomaly(True, check_nan=False)  # each node of the graph keeps its place

    def shows(self):
        """Return whether to record the values and draws of this step, too."""
        return self.count == self.outputs_at - 1

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
        if event != "rows":  # "step" follows at once
            self.file.flush()

    def begin(self):
        """Record that this rank has begun a step. If the step never ends, another rank has left the loop."""
        if not self.begun:
            self.begun = True
            self.write("begin")

    def end(self):
        """Record how the program ends, and its buffers and averages, which may have changed after its last step."""
        self.look_at_files()
        if hasattr(sys, "last_value"):
            self.write("failed")
        else:
            self.write_unoptimized("end")

    def write_unoptimized(self, event):
        if not any(hasattr(tensor, "full_tensor") for _, tensor in self.modules.unoptimized):  # needs all ranks
            self.write(event, unoptimized=self.unoptimized())

    def unoptimized(self, digests=()):
        digests = digests or digest([tensor for _, tensor in self.modules.unoptimized])
        return [[name, list(tensor.shape), found] for (name, tensor), found in zip(self.modules.unoptimized, digests)]

    def autocast(self, function, context):
        self.flags |= {"torch.bfloat16"} if context._enabled and self.native else set()  # autocast skips float64
        return function(context)

    def clip(self, function, parameters, *args, **more):
        norm = function(parameters, *args, **more)
        bound = args[0] if args else more.get("max_norm", more.get("clip_value"))
        if "with_norm" in function.__name__:
            norm = args[1] if len(args) > 1 else more["total_norm"]
        self.clips.append([0.0 if norm is None else float(dense(norm)), float(bound)])
        return norm

    def add_group(self, function, optimizer, group):
        function(optimizer, group)
        for item in optimizer.param_groups[-1]["params"]:
            if item.is_leaf and item.requires_grad and id(item) not in self.hooked:
                self.hooked[id(item)] = item
                self.owners[id(item)] = self.optimizers.setdefault(id(optimizer), len(self.optimizers))
                item.register_post_accumulate_grad_hook(self.reach_one)

    def reach_one(self, parameter):
        """Note that autograd has reached a parameter: under FSDP2, that its gradient has been reduced."""
        self.reached.add(id(parameter))
        self.touched = True
        if self.reached_by and self.owners[id(parameter)] not in self.reached_by[-1]:
            self.reached_by[-1].append(self.owners[id(parameter)])

    def collective(self, function, *args, **more):
        """Note a collective that takes a tensor that needs a gradient, except in an autograd.Function."""
        if not backward_runs() and any(item.requires_grad and not item.is_leaf and id(item) != self.loss
                                       for item in tensors_of((args, more))):
            frame = above = sys._getframe(2)
            while above and not isinstance(next(iter(above.f_locals.values()), None), torch._C._FunctionBase):
                above = above.f_back
            name = f"{function.__name__} in {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            self.lost += [name] * (not above and name not in self.lost)
        return function(*args, **more)

    def criterion(self, function, *args, **more):
        if not self.native and not torch.compiler.is_compiling():
            args, more = precision.widened_inputs(args, more)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not backward_runs():
            ignored = more.get("ignore_index", -100)
            self.counted += counts_of(tensors_of((args, more))[1:2], ignored)
            if self.shows():
                self.modules.note("targets", function.__name__, True, [
                    item if item.is_floating_point() else item[item != ignored]
                    for item in tensors_of((args, more))[1:2]])
            named = dict(zip(function.__code__.co_varnames, args)) | more
            name = CLASS_WEIGHTS.get(function.__name__)
            if isinstance(named.get(name), torch.Tensor):
                found = [f"{name} of {function.__name__}", digest([named[name]])[0]]
                self.weights += [found] * (found not in self.weights)
                self.counted += weight_of(named["target"], named[name], ignored)
        return function(*args, **more)

    def grad(self, function, outputs, inputs, *args, **more):
        """Note what torch.autograd.grad computes for parameters. It counts if the step has no backward()."""
        if torch._C._len_torch_function_stack():  # a mode, such as that of draws.py, calls it again
            return function(outputs, inputs, *args, **more)
        self.graphs += bool(args[2] if len(args) > 2 else more.get("create_graph"))
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
        taken = not backward_runs() and any(id(item) in self.hooked for item in inputs)
        losses, counts, gradients = self.taken
        if taken:
            self.note_losses(outputs, losses, counts)
        found = function(outputs, inputs, *args, **more)
        for item, grad in zip(inputs, found) if taken and self.shows() else ():
            if grad is not None:
                gradients[id(item)] = gradients.get(id(item), 0) + grad.detach()
        return found

    def note_losses(self, tensors, losses, counts):
        for loss in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:  # others are a pipeline's activations
                self.loss = id(loss)
                if self.shows():
                    self.modules.constants(loss)
                losses.append(dense(loss).sum())
                counts.append(sum(self.counted, []))
                self.counted = []
                self.flags.add(str(loss.dtype))

    def backward(self, function, tensors, *args, **more):
        if backward_runs():  # activation checkpointing calls backward inside another backward
            return function(tensors, *args, **more)
        self.note_losses(tensors, self.losses, self.counts)
        self.flags |= {"random"} if self.draws.drawn() else set()
        self.backwards += 1
        self.computed = {}
        if self.backwards == 1 or self.stale:
            items = {item: f"of weights of {self.title(optimizer)}" for optimizer in self.tables
                     for group in optimizer.param_groups for item in group["params"]}
            others = {item: f"that {self.last}{ELSEWHERE} left" for _, item in self.modules.unoptimized}
            found = {id(item): self.last and which for item, which in (others | items).items() if nonzero(item.grad)}
            self.stale = found if self.backwards == 1 else {key: self.stale[key] for key in {*found} & {*self.stale}}
        for optimizer, passes in self.passes.items():  # since its last step
            if passes and not any(nonzero(item.grad) for group in optimizer.param_groups for item in group["params"]):
                self.flags.add("reset")  # gradients were set to zero before a later micro-batch
            self.passes[optimizer] = passes + 1
        self.touched = False
        self.reached_by.append([])
        self.begin()
        self.samples.backward()
        try:
            return function(tensors, *args, **more)
        finally:
            self.samples.settle()
            if self.shows():
                self.computed = {key: item.grad.detach().clone() for key, item in self.hooked.items()
                                 if item.grad is not None}

    def title(self, optimizer):
        number = [*self.tables].index(optimizer) + 1
        return type(optimizer).__name__ + f" (the optimizer that steps as number {number})" * (len(self.tables) > 1)

    def index(self, function, iterator):
        return self.samples.index(function, iterator)

    def deliver(self, function, iterator):
        batch = self.samples.deliver(function, iterator, self.native)
        if torch.is_grad_enabled():
            self.draws.note()
            if id(iterator._dataset) in self.samples.trained:
                self.begin()
        return batch

    def call(self, function, module, /, *args, **more):
        """Record the inputs of the outermost module, which are the samples in a program without a DataLoader."""
        if torch.compiler.is_compiling():
            return function(module, *args, **more)
        training, tensors = module.training and torch.is_grad_enabled() and not backward_runs(), None
        trains = not self.depth and any(item.requires_grad for item in module.parameters())  # a loss has no parameters
        if not self.depth and not self.native:
            args, more = precision.widened_inputs(args, more, module.parameters())
        if not self.depth and training and not self.samples.trained and not any(self.samples.pending.values()):
            tensors = [value for value in tensors_of((args, more)) if value.ndim > 0]
            if trains and not any(map(from_parameters, tensors)):  # not of another module
                if not self.samples.called:
                    self.draws.note()
                self.samples.called = True
            else:
                tensors = None
        if module.training and any(word in type(module).__name__ for word in self.resting):
            module.eval()
        quiet = QUIET * (not torch.is_grad_enabled())
        shown = self.shows() and not backward_runs()
        if shown:
            if id(module) not in self.modules.names:
                self.modules.find((), self.optimized)  # before the first step of an optimizer, or a new module
            outermost = not any(self.draws.inside)  # a wrapper such as DDP has no name
            self.modules.passes(f"{quiet}input", module, (args, more), outermost)
            if origin := outermost and self.origin(tensors_of((args, more))):
                self.modules.computed[self.modules.names.get(id(module))] = origin
            self.modules.weights(module, quiet)
        self.depth += 1
        self.draws.inside.append(self.modules.names.get(id(module)))
        try:
            output = function(module, *args, **more)
        finally:
            self.depth -= 1
            del self.draws.inside[-1:]
        if tensors is not None:
            self.samples.follow(tensors, tensors_of(output))
        if training and trains:  # else, it is a loss, or it changes samples, as a normalization does
            self.samples.carry(tensors_of(output))
        if shown:
            self.modules.passes(f"{quiet}output", module, output, outermost)
        return output

    def origin(self, tensors):
        """Return where inputs of a model are from if they are no samples, or an empty string."""
        if any(map(from_parameters, tensors)):
            return "which the program computes from weights"
        return "a part of which the last call has returned, such as a state" * any(map(self.samples.carries, tensors))

    def before_hooks(self, optimizer, args, more):
        """Let before_step() follow the optimizer's own hooks, in which the program may average or clip gradients."""
        if optimizer in self.last_hooks:
            self.last_hooks[optimizer].remove()
        self.last_hooks[optimizer] = optimizer.register_step_pre_hook(self.before_step)

    def before_step(self, optimizer, args, more):
        if self.outer not in (None, optimizer):
            return  # an optimizer inside another one, as in ZeroRedundancyOptimizer
        if float(getattr(optimizer, "found_inf", None) or 0):
            return  # GradScaler found infinite gradients: the fused kernel skips this step
        trained = [(item, number) for number, group in enumerate(optimizer.param_groups) for item in group["params"]
                   if item.requires_grad and not item.is_meta]  # meta: the data is in another process
        self.parameters, self.groups = [item for item, _ in trained], [number for _, number in trained]
        self.optimized |= {id(item) for item in self.parameters}
        self.rates = [[float(optimizer.param_groups[number].get("lr") or 0)] for number in self.groups]
        if only_creates_state(optimizer, self.parameters):
            return
        self.joins = bool(self.stepped) and not self.backwards and optimizer not in self.stepped
        if self.count == self.steps > 0 and not self.joins:
            self.write_unoptimized("last")
            self.finish()
        self.outer = optimizer
        key = [id(item) for item in self.parameters]
        if self.tables.get(optimizer, [None])[0] != key:
            number = [*self.tables, optimizer].index(optimizer)
            names = self.modules.find(self.parameters, self.optimized)
            self.tables[optimizer] = key, *self.tabulate(number, names)
        if not self.backwards and not self.joins:
            self.samples.backward()
            self.losses, self.counts, self.computed = self.taken
            self.flags |= {"random"} if self.draws.drawn() else set()
        self.samples.settle()  # an optimizer may step inside the backward pass
        self.look_at_files()
        if self.saves:
            self.restored = self.states(optimizer), {"scalers": [item.state_dict() for item in self.modules.scalers],
                                                     "random": self.draws.checksums()}
        closure = len(args) > 1 or more.get("closure")
        self.reach = None if closure else self.reaches()
        scale = getattr(optimizer, "grad_scale", None)  # the fused kernel unscales inside the step
        grads = [] if closure else [item.grad if scale is None or item.grad is None else item.grad / scale
                                    for item in self.parameters]
        _, _, parts, small = self.tables[optimizer]
        probes, others = [self.parameters[number] for number in small], [item for _, item in self.modules.unoptimized]
        digests = digest(grads + probes + others,  # in one call, which is faster
                         parts[:len(grads)] + [parts[number] for number in small] + [None] * len(others))
        self.grads, digests = digests[:len(grads)], digests[len(grads):]
        self.before = self.unoptimized(digests[len(small):]), self.probes(digests)
        self.known = digest_if_known([self.computed.get(id(item)) for item in self.parameters], parts)

    def reaches(self):
        """Return for each parameter whether it has a gradient, and whether autograd has reached it in this step."""
        by_hand = not self.backwards and not self.joins  # such as gradients of torch.func
        return [MISSING if item.grad is None else REACHED if by_hand or id(item) not in self.hooked
                or id(item) in self.reached else UNREACHED for item in self.parameters]

    def states(self, optimizer):
        """Return {name: digest} of the optimizer's state for each parameter: of its tensors and numbers."""
        states = [{} for _ in self.parameters]
        values = [(state, str(name), torch.as_tensor(value)) for state, item in zip(states, self.parameters)
                  for name, value in optimizer.state.get(item, {}).items()
                  if isinstance(value, (int, float, torch.Tensor))]
        for (state, name, _), found in zip(values, digest([value for *_, value in values])):
            state[name] = found
        return states

    def look_at_files(self):
        """Record that a checkpoint was saved: a file in `saves` is new, or changed other than by growing, as a log."""
        if not self.saves or not self.file or self.rank:
            return
        paths = [f"{folder}/{name}" for path in self.saves for folder, _, names in os.walk(path) for name in names]
        before, self.files = self.files, {}
        for path in [*self.saves, *paths]:
            with contextlib.suppress(OSError):  # it does not exist yet, or has just been renamed
                self.files |= {} if os.path.isdir(path) else {path: os.stat(path)}
        changed = [(before.get(path), now) for path, now in self.files.items()]
        if any(not old or now.st_mtime_ns != old.st_mtime_ns and not (
                now.st_ino == old.st_ino and now.st_size > old.st_size) for old, now in changed):
            self.write("saved", after=self.count)

    def probes(self, digests):
        """Return the names, shapes and digests of some parameters, which show whether ranks have met again."""
        _, names, _, small = self.tables[self.outer]
        return [[*names[number][:2], found] for number, found in zip(small, digests)]

    def tabulate(self, optimizer, names):
        """Write the table of an optimizer, given its number and its parameters' names.

        Return lists: each parameter's (name, shape of the whole tensor, digest), the Parts, and the probes.
        """
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
        table = list(zip(names, shapes, digest(self.parameters, parts)))
        rows = [[*row, part and [hash(part.places), len(part.places) / part.total]] for row, part in zip(table, parts)]
        self.write("parameters", optimizer=optimizer, rows=rows)
        local = [number for number, item in enumerate(self.parameters) if not hasattr(item, "full_tensor")]
        return table, parts, sorted(local, key=lambda number: self.parameters[number].numel())[:PROBES]

    def after_step(self, optimizer, args, more):
        if optimizer is not self.outer:
            return
        norms, exact = torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm
        local = [self.modules.names.get(id(item)) for item in self.modules.leaves
                 if item.training and isinstance(item, norms) and not isinstance(item, exact)]
        self.flags |= {"batchnorm"} if local else set()
        self.flags |= {"evaluated"} if self.samples.evaluated else set()
        self.flags |= {"sharded" for _, item in self.modules.unoptimized if hasattr(item, "full_tensor")}
        keys, _, parts, small = self.tables[optimizer]
        others = [id(item) for _, item in self.modules.unoptimized]
        self.flags |= {"unreduced"} if self.reached & {*keys} and not self.touched else set()
        grads = self.grads or digest([item.grad for item in self.parameters], parts)
        before, probes = self.before
        self.flags |= {str(item.dtype) for item in self.parameters}
        number = [*self.tables].index(optimizer)
        values = digest(self.parameters, parts)
        self.write("rows", rows=[*zip(self.rates, grads, values, self.reach or self.reaches(), self.groups,
                                       self.known)],
                   options=[options_of(optimizer, *pair) for pair in enumerate(optimizer.param_groups)],
                   unoptimized=before, passed=self.modules.passed, sites=self.draws.sites,
                   places=self.modules.places, divisors=self.modules.divisors, operands=self.modules.operands,
                   computed=self.modules.computed, norms=local, states=self.restored[0])
        self.write("joined" if self.joins else "step", optimizer=number,
                   batches=[batch for *batch, _, _ in self.samples.batches],
                   labels=[label for *_, labels, _ in self.samples.batches for label in labels],
                   size=0 if self.samples.trained else max((size for *_, size in self.samples.batches), default=0),
                   losses=[*map(float, self.losses)], counts=self.counts, clips=self.clips, flags=[*self.flags],
                   lost=self.lost, weights=self.weights, reached=[*map(sorted, self.reached_by)],
                   graphs=self.graphs / max(self.backwards, 1),
                   stale=sorted({self.stale[key] for key in keys + others if self.stale.get(key)}),
                   replicas=self.modules.replicas, before=probes,
                   after=self.probes([values[number] for number in small]),
                   resting=sum(not item.training for item in self.modules.leaves),
                   **self.restored[1])
        self.last = self.title(optimizer)
        self.reached -= {*keys}
        self.passes[optimizer] = 0
        self.outer, self.count = None, self.count + (not self.joins)
        if self.joins:
            self.stepped.append(optimizer)
        else:
            self.stepped = [optimizer]
        self.clear()
        self.draws.note()
        if self.count == self.steps and self.saves:  # else, before the next step: another optimizer may follow
            self.finish()

    def finish(self):
        """Wait for the end, after the last step to be recorded."""
        open(f"{self.folder}/done-{self.rank}-of-{self.world}", "w").close()
        while os.path.isdir(self.folder):  # other ranks may need this rank: wait until verify kills all ranks
            if os.path.exists(f"{self.folder}/signalled"):  # or until it has sent a signal
                return
            time.sleep(0.1)
        os._exit(0)


def only_creates_state(optimizer, parameters):
    """Return whether a step has rate 0 and no gradients, like that of torch.distributed.checkpoint before it loads."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return all(rate is not None and not float(rate) for rate in rates) and not any(nonzero(x.grad) for x in parameters)


def options_of(optimizer, number, group):
    """Return the options of a group of parameters except its learning rates, as text."""
    values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in group.items()
              if name not in ("params", "param_names", "name") and "lr" not in name}
    plain = {name: str(value) for name, value in values.items() if isinstance(value, (int, float, str, list, tuple))}
    inner = getattr(optimizer, "optim", None)  # as in ZeroRedundancyOptimizer
    kind = type(inner if isinstance(inner, torch.optim.Optimizer) else optimizer).__name__
    return {"optimizer": kind, "group": str(group.get("name", number)), **plain}


def digest_if_known(tensors, parts):
    """Return the digests, or None for each tensor if one is missing: a program may set a gradient by hand."""
    return digest(tensors, parts) if all(item is not None for item in tensors) else [None] * len(tensors)


def backward_runs():
    return torch._C._current_graph_task_id() >= 0


def from_parameters(tensor):
    """Return whether a tensor was computed from parameters, and not only from inputs such as the points of a PINN."""
    nodes, known = [tensor.grad_fn], {None}
    for node in nodes:  # it grows
        if node not in known:
            known.add(node)
            if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
                return True
            nodes += [parent for parent, _ in node.next_functions]
    return False


def nonzero(grad):
    """Return whether a gradient has any value but zero."""
    if grad is None or grad.numel() == 0:
        return False
    grad = grad.detach()
    grad = grad.to_local() if hasattr(grad, "to_local") else grad
    grad = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
    return bool(grad.reshape(-1)[:64].any() or grad.any())  # most often, a few values tell
