"""Is told to end while torch builds a loader's iterator: "early", before it has workers; "late", as they start."""
import os
import signal
import sys
from collections.abc import Iterator

from torch.utils.data import DataLoader, Sampler

from common import cli


class Ending(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        if sys.argv[1] == "early":
            os.kill(os.getpid(), signal.SIGTERM)
        return self.batches()

    def batches(self) -> Iterator[list[int]]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield [0]


if __name__ == "__main__":
    with cli.report_errors():
        next(iter(DataLoader([0], batch_sampler=Ending(), num_workers=2)))
