"""Watch the modules of a program: their names, inputs and outputs, and the tensors that no optimizer changes."""
import collections
import gc
import os
import re

import torch

from .digests import NOT_FINITE, SMALL, digest, real, wave
from .records import CONSTANT, FROZEN, PRODUCTS, UNNAMED, WEIGHT


class Modules:
    """The modules that the program has created, as of the last call of find()."""

    def __init__(self):
        self.names, self.leaves, self.replicas, self.scalers = {}, [], False, []  # names: {id(module): name}
        self.passed = []  # [kind, name, whether outermost, width, size, squared norm, wave] of inputs and outputs
        self.outputs = []  # nodes of the graph: the outputs of modules with parameters
        self.places, self.divisors, self.operands = {}, [], []  # {name of a constant: file and line}; of constants()
        self.computed = {}  # {name of a module whose input is no sample: where it is from}
        self.held = []  # of unoptimized: [(name, tensor as of find(), for a buffer its module and attribute)]

    @property
    def unoptimized(self):
        """[(name, tensor)] of buffers, averages of the weights, and weights that other ranks update.

        A program may give a buffer another tensor, as `self.count = total` does.
        """
        now = [(name, owner._buffers.get(attribute) if owner else None, item)
               for name, item, owner, attribute in self.held]
        return [(name, item if tensor is None else tensor) for name, tensor, item in now]

    def find(self, parameters, optimized):
        """Find all modules, buffers and averages of the weights; return a name for each of `parameters`."""
        gc.unfreeze()  # gc.get_objects() omits objects that the program has frozen
        names = {}
        found = [item for item in gc.get_objects() if issubclass(type(item), (torch.nn.Module, torch.amp.GradScaler))]
        self.scalers = [item for item in found if isinstance(item, torch.amp.GradScaler)]
        modules = [item for item in found if isinstance(item, torch.nn.Module)]
        inside = {id(child) for module in modules for child in module.children()}
        outermost = [module for module in modules if id(module) not in inside]
        for module in modules:
            for name, item in module.named_parameters():
                names[id(item)] = max(names.get(id(item), ""), plain(name), key=len)
        self.names = {id(part): plain(f"{name}.")[:-1] for module in outermost for name, part in module.named_modules()}
        wrappers = {id(item) for item in modules if any(not self.names[id(part)] for part in item.children())}
        self.names = {id(item): self.names[id(item)] or type(item).__name__ for item in modules
                      if id(item) not in wrappers}
        self.leaves = [module for module in modules if not module._modules]
        self.replicas = any(isinstance(module, torch.nn.parallel.DistributedDataParallel)
                            and module.process_group.size() == torch.distributed.get_world_size()
                            for module in modules)
        trained = [module for module in outermost if any(id(item) in optimized for item in module.parameters())]
        if parameters and not trained:  # flat shards, or a program without modules
            trained = [module for module in outermost if any(item.requires_grad for item in module.parameters())]
        parts = [shapes_of(part) for module in trained for part in module.modules()]  # such as a student
        averages = [module for module in outermost if module not in trained and shapes_of(module)
                    and shapes_of(module) in parts]
        found = {id(item): (f"{'buffer' if module in trained else 'other buffer'} {plain(name)}", item)
                 for module in outermost for name, item in module.named_buffers()}
        found |= {id(item): (f"{WEIGHT}{plain(name)}", item) for module in trained  # that other ranks update
                  for name, item in module.named_parameters() if item.requires_grad and id(item) not in optimized}
        for module in averages:
            found |= {id(item): (f"average of {plain(name)}", item) for name, item in module.named_parameters()}
            found |= {id(item): (f"average's buffer {plain(name)}", item) for name, item in module.named_buffers()}
        owners = {id(item): (part, attribute) for module in outermost for part in module.modules()
                  for attribute, item in part._buffers.items() if item is not None}
        self.held = sorted(((name, item, *owners.get(key, (None, ""))) for key, (name, item) in found.items()
                            if item.numel() and not item.is_meta and real(item).is_floating_point()),
                           key=lambda row: row[0])
        return [names.get(id(item), UNNAMED) for item in parameters]

    def weights(self, module, quiet=""):
        """Note the weights with which a module computes, in the form of passes(), if this rank has all of them.

        In a call without gradients (`quiet`), note only those that are frozen.
        """
        own = [item for item in module._parameters.values() if type(item) is torch.nn.Parameter and not item.is_meta]
        kind = "weights" if any(item.requires_grad for item in own) else FROZEN
        if id(module) in self.names and own and (kind == FROZEN or not quiet):
            digests = digest([item.detach() for item in own])
            self.passed.append([kind, self.names[id(module)], False, 0, sum(item.numel() for item in own),
                                *[sum(numbers) for numbers in zip(*digests)][:2]])

    def passes(self, kind, module, value, outermost):
        """Note the sums of a module's inputs or outputs over all elements, except outputs of one element: losses."""
        tensors = [real(item) for item in tensors_of(value)] if id(module) in self.names else []
        arrays = [item for item in tensors if item.ndim]
        if kind == "output" and any(True for _ in module.parameters()):
            self.outputs += [item.grad_fn for item in arrays if item.grad_fn]
        if arrays or "input" in kind:  # ranks do not split a scalar, such as a scale
            self.note(kind, self.names.get(id(module)), outermost, arrays or tensors)

    def constants(self, loss):
        """Note what enters a loss besides the outputs of modules, and needs no gradient: masks, weights, selections."""
        nodes, known, counts = [loss.grad_fn], {*self.outputs}, collections.Counter()
        for node in nodes:  # it grows
            if node is None or node in known:
                continue
            known.add(node)
            nodes += [parent for parent, _ in node.next_functions]
            divisor = getattr(node, "_saved_other", None) if node.name().startswith("Div") else None
            if isinstance(divisor, torch.Tensor) and divisor.numel():  # its shape and number, sums, file and line
                flat = divisor.detach().double().reshape(-1)
                counts[divisor.shape] += 1
                sums = [float(flat.sum()), float(flat @ wave(len(flat), flat.device).real)][:1 + bool(divisor.ndim)]
                self.divisors.append([f"{tuple(divisor.shape)} {counts[divisor.shape]}", sums, place_of(node)])
            self.note_operands(node, counts)
            for field in (field for field in dir(node) if field.startswith("_saved_")):
                value = None if "_result" in field else getattr(node, field)  # a result follows from the operands
                if type(value) is torch.Tensor and value.ndim and not value.requires_grad and (
                        value.is_floating_point() or value.dtype == torch.bool):
                    key = node.name().partition("Backward")[0], field, value.shape[1:]
                    counts[key] += 1
                    name = f"{key[0]} {counts[key]} {field} {tuple(value.shape[1:])}"
                    self.places[name] = place_of(node)
                    self.note(CONSTANT, name, True, [value.double()])

    def note_operands(self, node, counts):
        """Note small tensors on which a node of a loss does not depend linearly: [name, shapes, digests, place].

        Of a product, these are both factors, or a vector that needs no gradient.
        """
        name, fields = node.name().partition("Backward")[0], [field for field in dir(node) if field[:7] == "_saved_"]
        fields = ["_saved_other"] * ("_saved_other" in fields) if name == "Div" else fields
        found = [getattr(node, field) for field in fields if "weight" not in field]  # the sum of classes' weights
        found = [item for item in found if type(item) is torch.Tensor and item.is_floating_point() and item.numel()]
        product = name in PRODUCTS and len(found) == 1
        if found and all(item.numel() <= SMALL for item in found) and (not product or found[0].ndim):
            shapes = str([tuple(item.shape) for item in found])
            counts[name, shapes] += 1
            self.operands.append([f"{name} {counts[name, shapes]}", shapes, digest(found), place_of(node)])

    def note(self, kind, name, outermost, tensors):
        """Note the sums of tensors over all elements; they add up over ranks and micro-batches."""
        found = {}  # {(kind, width): matrices}
        tensors = [item.detach() for item in tensors if item.numel()]
        for item in sorted(tensors, key=lambda item: not item.is_floating_point()):
            floats = item.is_floating_point()
            width = item.shape[-1] if floats and item.ndim > 1 else 1  # the sum of integers, which are no waves
            key = kind if floats else f"{kind} (integers)", width
            found.setdefault(key, []).append(item.double().nan_to_num(*NOT_FINITE).reshape(-1, width))
        for (what, width), flat in found.items():
            waves = [(item @ wave(width, item.device).real).sum() for item in flat]  # a plane wave along the last axis
            self.passed.append([what, name, outermost, width, sum(item.numel() for item in flat),
                                float(sum(item.square().sum() for item in flat)), float(sum(waves))])


def place_of(node):
    """Return the file and the line of the program that made a node of the graph, if torch detects anomalies, or ""."""
    found = re.findall(r'^  File "(.*)", line (\d+)', "".join(node.metadata.get("traceback_", ())), re.M)
    for path, number in reversed(found):
        if not re.search(r"\b(site|dist)-packages\b", path) and os.path.dirname(path) != os.path.dirname(__file__):
            return f"{os.path.basename(path)}:{number}"
    return ""


def shapes_of(module):
    return [item.shape for item in module.parameters()]


def plain(name):
    """Return the name of a parameter, buffer or module without the prefixes that DDP, FSDP and others add."""
    for wrapper in ("_forward_module.", "_orig_mod.", "_fsdp_wrapped_module.", "module."):
        name = name.replace(wrapper, "")
    return name


def tensors_of(value):
    """Return the plain dense tensors in a nested value, without those of meta devices. Those of vmap have all rows."""
    return [item for item in map(unwrapped, torch.utils._pytree.tree_leaves(value)) if type(item) is torch.Tensor
            and not item.is_meta and item.layout == torch.strided]


def unwrapped(value):
    """Return the tensor inside the wrappers of torch.func, with the axis that vmap maps over in front."""
    functions = torch._C._functorch
    while isinstance(value, torch.Tensor) and functions.is_functorch_wrapped_tensor(value):
        axis, value = functions.maybe_get_bdim(value), functions.get_unwrapped(value)
        value = value.movedim(axis, 0) if axis > 0 else value
    return value
