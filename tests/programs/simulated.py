"""Run a script on a simulated accelerator: its tensors compute on the CPU, and refuse to meet tensors of the CPU.

    python tests/programs/simulated.py train.py --epochs 2
    python -m torch.distributed.run --nproc-per-node=2 tests/programs/simulated.py train_DDP.py

The script runs unchanged and finds one device, "npy", with `torch.accelerator`. Everything here uses what torch offers
to makers of devices: PrivateUse1 for the device, torch.library for its operations, Backend.register_backend for its
communication, register_package for checkpoints. What differs from a GPU: there is one device for all processes, nothing
runs asynchronously, random numbers are the CPU's, and an index on the CPU is refused, which CUDA accepts.
"""
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import _pytree, backend_registration

NAME = "npy"
COPIES = ("aten::_to_copy", "aten::copy_")  # the operations that may see tensors of two devices


class Elsewhere(torch.Tensor):
    """A tensor on the simulated device. Its values are in `on_cpu`, which no script looks at."""

    @staticmethod
    def __new__(cls, on_cpu):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.shape, strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset(), dtype=on_cpu.dtype,
            device=torch.device(NAME, 0))
        tensor.on_cpu = on_cpu
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})

    def tolist(self):  # torch's own refuses subclasses
        return self.on_cpu.tolist()

    def __reduce_ex__(self, protocol):
        """Pickle the values, since torch saves the storage, which is empty here; the file names this device."""
        self.on_cpu.untyped_storage().location = str(self.device)
        return self.on_cpu.__reduce_ex__(protocol)


def compute(operation, args, kwargs):
    """Return what an operation of torch's gives on the simulated device; RuntimeError where two devices meet.

    As on CUDA a CPU tensor without dimensions may take part, but not receive a result (ATen's TensorIterator.cpp).
    """
    name = operation.name()
    arguments = {argument.name: argument for argument in operation._schema.arguments}
    here, places = {}, set()  # tensors of this device by the identity of their values; the devices met

    def unwrap(argument, part):
        written = argument.alias_info is not None and argument.alias_info.is_write

        def value_of(value):
            if isinstance(value, Elsewhere):
                here[id(value.on_cpu)] = value
                places.add(NAME)
                return value.on_cpu
            if isinstance(value, torch.device) and value.type == NAME:
                return torch.device("cpu")
            if isinstance(value, torch.Tensor) and (value.dim() or written):
                places.add("cpu")
            return value

        return _pytree.tree_map(value_of, part)

    def wrap(value):
        if not isinstance(value, torch.Tensor):
            return value
        return here[id(value)] if id(value) in here else Elsewhere(value)

    cpu_args = [unwrap(argument, part) for argument, part in zip(arguments.values(), args)]
    cpu_kwargs = {key: unwrap(arguments[key], part) for key, part in kwargs.items()}
    if len(places) == 2 and name not in COPIES:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {NAME}:0 and cpu")
    if operation.namespace == "c10d":
        return communicate(operation, cpu_args, wrap)
    result = operation(*cpu_args, **cpu_kwargs)
    device = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or NAME)
    return _pytree.tree_map(wrap, result) if device.type == NAME else result


def communicate(operation, args, wrap):
    """Return what a collective operation gives: it runs on the values, by the gloo of its process group."""
    at = next(at for at, argument in enumerate(operation._schema.arguments) if argument.name == "process_group")
    group = dist.ProcessGroup.unbox(args[at])
    twin = dist.ProcessGroup(group.rank(), group.size())
    twin._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM,
                           group._get_backend(torch.device(NAME)))
    args[at] = twin.boxed()
    *tensors, work = result if isinstance(result := operation(*args), tuple) else (result,)
    future = dist.Work.unbox(work).get_future().then(lambda done: _pytree.tree_map(wrap, done.value()))
    work = torch._C._distributed_c10d._create_work_from_future(future).boxed()
    return (*_pytree.tree_map(wrap, tensors), work) if tensors else work


def refuse(storage, location):
    """Refuse to load a tensor onto this device, which is what `torch.load` without `map_location` asks for."""
    if location.startswith(NAME):
        raise RuntimeError(f"torch.load without map_location: a tensor of {location}")


class Module(backend_registration._DummyBackendModule):
    """What `torch.get_device_module("npy")` returns: one device, whose random numbers are the CPU's."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


def register():
    """Make the device known to torch; return what has to live as long as it."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    dist.Backend.register_backend("simulated", dist.ProcessGroupGloo, devices=[NAME])
    torch.serialization.register_package(5, lambda storage: getattr(storage, "location", None), refuse)

    # Operations that torch calls without a tensor of the device, or past __torch_dispatch__ (as torch.tensor does)
    library = torch.library.Library("aten", "IMPL")

    def on_device(operation):
        return lambda *args, **options: Elsewhere(operation(*args, **options | {"device": "cpu", "pin_memory": False}))

    library.impl("empty.memory_format", on_device(torch.ops.aten.empty.memory_format), "PrivateUse1")
    library.impl("empty_strided", on_device(torch.ops.aten.empty_strided.default), "PrivateUse1")
    for overload in ("default", "start", "start_step"):  # torch's own resizes an empty tensor
        arange = getattr(torch.ops.aten.arange, overload)
        library.impl(arange.name(), on_device(arange), "PrivateUse1")
    copy = torch.ops.aten.copy_.default
    library.impl("_copy_from", lambda source, target, wait=False: compute(copy, (target, source), {}), "PrivateUse1")
    library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")  # no memory here is page-locked

    # Autocast, for the operations of these networks as CUDA's lists have them (ATen's autocast_mode.h)
    def cast(operation, dtype=None):
        def run(*args, **options):
            wanted = dtype or torch.get_autocast_dtype(NAME)
            with torch.autocast(NAME, enabled=False):
                return operation(*(value.to(wanted) if isinstance(value, torch.Tensor) and value.is_floating_point()
                                   else value for value in args), **options)

        return run

    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library.impl("conv2d", cast(torch.ops.aten.conv2d.default), "AutocastPrivateUse1")
    library.impl("linear", cast(torch.ops.aten.linear.default), "AutocastPrivateUse1")
    library.impl("cross_entropy_loss", cast(torch.ops.aten.cross_entropy_loss.default, torch.float32),
                 "AutocastPrivateUse1")

    # As on a GPU, Module.to moves the parameters themselves: an optimizer that has them keeps them
    torch.__future__.set_swap_module_params_on_conversion(True)

    # No work is ever under way here, but torch gives a device in Python no way to say so:
    # c10/core/impl/DeviceGuardImplInterface.h raises "Backend doesn't support synchronizing all streams on device"
    torch.accelerator.synchronize = lambda device=None: None
    return library, everything


if __name__ in ("__main__", "__mp_main__"):  # the second: in a process that multiprocessing spawns
    import simulated  # again, as a module: the script takes this one over

    _libraries = simulated.register()
    if __name__ == "__main__":
        del sys.argv[0]
        os.environ["SIMULATED_SCRIPT"] = os.path.abspath(sys.argv[0])
        sys.path.insert(0, os.path.dirname(os.environ["SIMULATED_SCRIPT"]))
    exec(compile(Path(os.environ["SIMULATED_SCRIPT"]).read_text(), os.environ["SIMULATED_SCRIPT"], "exec"))
