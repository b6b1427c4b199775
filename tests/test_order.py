"""Which samples come when, and how they are augmented, follows from (seed, epoch, index) and from nothing else."""
import os

import pytest
from conftest import FROM_ROOT, PROGRAMS, PYTHON, TORCHRUN, good, load, run


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Read two epochs on 1 and 3 processes; return a function from (processes, workers, epoch) to global batches."""
    folder = tmp_path_factory.mktemp("read")
    for launcher in [PYTHON], [*TORCHRUN, "--nproc-per-node=3"]:
        good(run(*launcher, PROGRAMS / "reader.py", folder, env=FROM_ROOT))

    def get(processes, workers, epoch):
        import torch

        shares = [load(folder / f"{processes}-{rank}-{workers}-{epoch}.pt") for rank in range(processes)]
        return [torch.stack(batch, 1).flatten(0, 1) for batch in zip(*shares, strict=True)]

    get.alive = lambda processes, workers: load(folder / f"{processes}-0-{workers}-alive.pt")
    get.default_workers = {processes: load(folder / f"{processes}-0-default.pt") for processes in (1, 3)}
    return get


def test_the_same_batches_on_any_number_of_processes_and_workers(read):
    import torch

    for epoch in (1, 2):
        reference = read(1, 0, epoch)
        assert len(reference) == 5 and len(torch.cat(reference).flatten(1).unique(dim=0)) == 60
        for processes in (1, 3):
            for workers in (0, 1, 2):
                batches = read(processes, workers, epoch)
                assert all(torch.equal(left, right) for left, right in zip(reference, batches, strict=True))


def test_by_default_a_core_is_left_to_each_process_and_workers_have_the_others(read):
    cores = len(os.sched_getaffinity(0))
    assert read.default_workers == {1: min(2, cores - 1), 3: max(0, min(2, cores // 3 - 1))}


def test_workers_live_through_all_epochs(read):
    for workers in (0, 1, 2):
        first, second, third = read.alive(1, workers)
        assert len(first) == workers and first == second == third


def test_epochs_differ_in_order_and_in_augmentation(read):
    first, second = read(1, 0, 1), read(1, 0, 2)
    assert not any(left.equal(right) for left, right in zip(first, second, strict=True))
