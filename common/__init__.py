"""What the scripts share: networks, data, checkpoints, one-line errors. No training loop lives here.

Imported before torch, whose import takes seconds: Ctrl-C during an import ends the process as it ends any program, and
not with a traceback from the middle of somebody's module. Everywhere else it is the KeyboardInterrupt that it was. And
a process of torchrun's ends with torchrun, however that ends: it would wait for the others, or train on unseen.
"""
import ctypes
import os
import signal
import sys
import threading


def end_with_parent(number):
    """Let the system send this process the signal `number` when its parent ends (on Linux; elsewhere, nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def _interrupt(number, frame):
    while frame:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        frame = frame.f_back
    raise KeyboardInterrupt


if threading.current_thread() is threading.main_thread() \
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)

if "TORCHELASTIC_RUN_ID" in os.environ:
    end_with_parent(signal.SIGTERM)
