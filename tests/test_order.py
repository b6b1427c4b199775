"""The order of samples and their augmentation depend only on (seed, epoch, index)."""
import pytest
import torch
from conftest import FROM_ROOT, PROGRAMS, TORCHRUN, good, load, run


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Read two epochs as 1 and as 2 processes; return a function from (processes, workers, epoch) to global batches."""
    folder = tmp_path_factory.mktemp("read")
    good(run(*TORCHRUN, "--nproc-per-node=2", PROGRAMS / "reader.py", folder, env=FROM_ROOT))

    def get(processes, workers, epoch):
        shares = [load(folder / f"{processes}-{rank}-{workers}-{epoch}.pt") for rank in range(processes)]
        return [torch.stack(batch, 1).flatten(0, 1) for batch in zip(*shares, strict=True)]

    return get


def test_the_same_batches_on_any_number_of_processes_and_workers(read):
    for epoch in (1, 2):
        reference = read(1, 0, epoch)
        assert len(reference) == 5 and len(torch.cat(reference).flatten(1).unique(dim=0)) == 60
        for processes in (1, 2):
            for workers in (0, 1, 2):
                batches = read(processes, workers, epoch)
                assert all(torch.equal(left, right) for left, right in zip(reference, batches, strict=True))


def test_epochs_differ_in_order_and_in_augmentation(read):
    first, second = read(1, 0, 1), read(1, 0, 2)
    assert not any(left.equal(right) for left, right in zip(first, second, strict=True))
