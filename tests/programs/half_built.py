"""Is told to end while torch builds a loader's iterator: "early", before it has workers; "late", as they start.

"spawning": when its first worker runs, but has not yet received what it works on.
"""
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import DataLoader, Sampler

from common import endings


class Ending(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        if sys.argv[1] == "early":
            os.kill(os.getpid(), signal.SIGTERM)
        return self.batches()

    def batches(self) -> Iterator[list[int]]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield [0]


def end_when_a_worker_runs() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while not any("spawn_main" in Path(f"/proc/{child}/cmdline").read_text() for child in children.read_text().split()):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    with endings.report_errors():
        if sys.argv[1] == "spawning":
            threading.Thread(target=end_when_a_worker_runs, daemon=True).start()
            iterator = iter(DataLoader(bytes(10 ** 8), num_workers=1, multiprocessing_context="spawn"))
            signal.pause()
        next(iter(DataLoader([0], batch_sampler=Ending(), num_workers=2)))
