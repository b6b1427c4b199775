"""The command line: arguments that are checked, and mistakes that end in one line instead of a traceback."""
import argparse
import contextlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import traceback

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from common import end_with_parent

PATIENCE = 10  # seconds that a process which is not to blame leaves the launcher to end it
STOPPED = 85  # exit code of a run that a signal stopped after a save: "start me again"

_noted = threading.Event()


class UsageError(Exception):
    """The command asks for what cannot be done. Every process finds this out alike; exit code 2."""

    exit_code = 2


class RunError(Exception):
    """The run failed, for a reason that all processes know alike (a loss that is not finite); exit code 1."""

    exit_code = 1


class ProcessError(RunError):
    """The run failed, for a reason that this process alone knows (a file it could not read); exit code 1."""


class ArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line, shows defaults, and takes no abbreviations."""

    def __init__(self, description):
        super().__init__(description=description.strip(), allow_abbrev=False, formatter_class=_HelpFormatter)

    def error(self, message):
        raise UsageError(f"{message} (see --help)")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        shown = action.default not in (None, False, argparse.SUPPRESS) and "default" not in action.help
        return action.help + " (default: %(default)s)" if shown else action.help


def _number(convert, holds, wanted):
    def parse(text):
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


positive_int = _number(int, lambda value: value > 0, "a whole number above 0")
count = _number(int, lambda value: value >= 0, "a whole number, 0 or more")
positive = _number(float, lambda value: value > 0, "a number above 0")
not_negative = _number(float, lambda value: value >= 0, "a number, 0 or more")
fraction = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
port_number = _number(int, lambda value: 0 < value < 65536, "a port, 1 to 65535")


def select_device(name, local_rank=None):
    """Return the `torch.device` called `name`; for None the accelerator if one is there, else the CPU.

    With `local_rank` each process of a machine takes the next device (several share one where there are fewer devices
    than processes, or where the scheduler shows each process its own alone), and it is made the current one, so that
    nothing opens a context on device 0 besides. Raises UsageError for a device that this machine does not have.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device(name) if name else accelerator or torch.device("cpu")
    except RuntimeError:
        raise UsageError(f"--device {name}: no such kind of device; try cpu, cuda, cuda:1, xpu or mps") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        here = accelerator.type if accelerator else "none"
        raise UsageError(f"--device {name}: not on this machine (its accelerator: {here}); try --device cpu")
    if (device.index or 0) >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise UsageError(f"--device {name}: this machine has {count}, numbered from 0")
    if local_rank is not None:
        device = torch.device(device.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    return device


def count_devices(name):
    """Return how many processes suit the device called `name` (see select_device): one for each, or 2 on a CPU."""
    return 2 if select_device(name).type == "cpu" else torch.accelerator.device_count()


def serve_store(host, port, nodes):
    """Return a TCPStore that this process serves, at a free port where `port` is 0.

    Raises UsageError for a port that is in use, for a host that is not this one, or for several `nodes` and no port.
    """
    if nodes > 1 and not port:
        raise UsageError(f"--nnodes {nodes}: the other hosts cannot guess the port; name one with --port")
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = "in use" if "EADDRINUSE" in str(error) else _first_line(error)
        raise UsageError(f"--port {port} on --ip {host}: {reason}") from None


def peak_memory(device):
    """Return "  N MiB", the most memory that tensors took on `device` so far; "" where no device counts it."""
    measure = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return f"  {measure(device) / 2**20:,.0f} MiB" if measure else ""


def note_signals(*names):
    """From now on only note these signals, however often they come; return the `threading.Event` that says so.

    This thread blocks them, so that the loader's workers, whom it starts, inherit the block: see `shield_worker`.
    """
    numbers = {getattr(signal, name) for name in names if hasattr(signal, name)}  # Windows has no SIGUSR1
    for number in numbers:
        signal.signal(number, lambda *_: _noted.set())  # where a thread of torch's takes it
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        threading.Thread(target=_note, args=(numbers,), daemon=True).start()
    return _noted


def _note(numbers):
    while signal.sigwait(numbers):
        _noted.set()


def tie_worker(worker_id):
    """In a DataLoader's worker (its `worker_init_fn`): end when the process that reads from it ends.

    torch's own watchdog misses a death while the worker still starts, which under spawn takes seconds, and the worker
    would stay for ever.
    """
    end_with_parent(signal.SIGKILL)  # under forkserver the server is the parent, and ends too
    if not multiprocessing.parent_process().is_alive():
        os._exit(1)


def shield_worker(worker_id):
    """As `tie_worker`, and heed SIGTERM from the training process alone.

    Schedulers signal every process of a job. A worker that ended so would break the epoch that is to be saved.
    """
    tie_worker(worker_id)
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_end_with_parent, args=(multiprocessing.parent_process().pid,), daemon=True).start()
    elif hasattr(signal, "pthread_sigmask"):  # macOS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_with_parent(parent):
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def stopped(epoch, step):
    """Return the exit code of a run that a signal stopped after this step; the main process says so."""
    for name in ("SIGTERM", "SIGUSR1"):  # where one process has left, launchers signal the others
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if int(os.environ["RANK"]) == 0:
        print(f"epoch {epoch}, step {step}: stopped by a signal and saved; the same command with --resume auto goes on")
    return STOPPED


@contextlib.contextmanager
def report_errors():
    """End the process with one line on standard error for every failure that can be foreseen.

    Of the processes of one launch the one that knows the cause speaks: the main process where all know it alike, else
    the one that met it, with its rank. The others, which at most notice that a connection broke, first give the
    launcher PATIENCE seconds to end them, and speak only if it does not. Anything unforeseen keeps its traceback.
    A process that no launcher watches over takes SIGTERM as it takes Ctrl-C: it ends what it started, then itself.
    Exit codes: 2 for wrong usage, 1 for a failed run, 130 for Ctrl-C, 143 for SIGTERM.
    """
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    if hasattr(sys.stdout, "reconfigure"):  # an epoch's line is in the log when the epoch is done, not at the end
        sys.stdout.reconfigure(line_buffering=True)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it would talk after the one line
    several = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1))) > 1
    who = f"rank {rank}: " if several else ""
    has_parent = multiprocessing.parent_process() is not None  # of mp.spawn, which speaks for it
    if not several:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except ProcessError as error:
        _end(who + _last_line(error), error.exit_code)
    except (UsageError, RunError) as error:
        if rank:
            _wait_to_be_ended()
        _end(who * bool(rank) + _last_line(error), error.exit_code)
    except ProcessExitedException as error:  # of mp.spawn, in the parent: a process that failed has spoken already
        if error.exit_code < 0:
            name = signal.Signals(-error.exit_code).name
            _end(f"process {error.error_index} was ended by {name}; the others were stopped", 1)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would cut the clearing up short
        code = error.args[0] if error.args else 128 + signal.SIGINT
        if has_parent or rank:
            sys.exit(code)
        for process in multiprocessing.active_children():  # Ctrl-C has reached them too
            if code != 130:
                os.kill(process.pid, signal.SIGINT)
            process.join(3)
            process.terminate()
        _end("interrupted" if code == 130 else "ended by SIGTERM", code)
    except torch.OutOfMemoryError as error:
        advice = "try a smaller --batch-size, or train_grad_accum.py"
        _end(f"{who}out of memory: {_first_line(error)} {advice}", 1)
    except RuntimeError as error:  # gloo raises the bare class, the other backends and the store a DistError
        if "DataLoader worker" in str(error):
            _end(f"{who}{_first_line(error)} (out of memory? fewer --workers take less)", 1)
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        late = "imed out" in str(error)
        if not late or os.environ.get("LOCAL_RANK", "0") != "0":  # all on a host are late together: one of them speaks
            _wait_to_be_ended()
        advice = "look at the hosts, their network and --timeout" if late else "the first that failed says why"
        _end(f"{who}{_where(error)}lost the other processes: {_first_line(error)} ({advice})", 1)


def _interrupt(*_):
    raise KeyboardInterrupt(128 + signal.SIGTERM)


def _wait_to_be_ended():
    _noted.wait(PATIENCE)


def _where(error):
    # the training loop's own variables say how far it was
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "main" and "epoch" in frame.f_locals:
            return f"epoch {frame.f_locals['epoch']}, step {frame.f_locals.get('step', 0)}: "
    return ""


def _end(line, exit_code):
    print(f"{os.path.basename(sys.argv[0])}: error: {line}", file=sys.stderr, flush=True)
    sys.exit(exit_code)


def _first_line(error):
    return str(error).strip().splitlines()[0]


def _last_line(error):
    # a DataLoader worker's error arrives with the worker's traceback; its last line is "Class: message"
    return str(error).strip().splitlines()[-1].removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")
