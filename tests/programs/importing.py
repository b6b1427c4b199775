"""Imports all of common/, then shuts down as asyncio does on Ctrl-C, and prints the result."""
import asyncio
import ctypes
import importlib
import signal
import sys
from pathlib import Path

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
handlers = [signal.getsignal(number) for number in SIGNALS]
common = importlib.import_module("common")
folder = Path(common.__file__).parent
for path in folder.rglob("[!_]*.py"):
    importlib.import_module(".".join(["common", *path.relative_to(folder).with_suffix("").parts]))
assert handlers == [signal.getsignal(number) for number in SIGNALS]


async def main():
    try:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("shut down")
        raise


try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
if sys.platform == "linux":
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
    assert number.value == 0
