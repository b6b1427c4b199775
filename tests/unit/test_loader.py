"""What loader.py says of its speed and when it writes a preview, by a clock of one's own; loader_DALI.py has its lines.

tests/test_loaders.py has what the loaders deliver.
"""
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import resize

import loader
from common import errors
from common.pairs import pairs


class Slow:
    """Three batches of two pairs: the first takes 4 seconds, the others one each."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 3

    def __iter__(self):
        for seconds in (4, 1, 1):
            self.clock.now += seconds
            yield torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs two epochs, as the main process or another, and counts the previews."""
    clock, previews = SimpleNamespace(now=100.0), []
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(loader, "time", clock)
    monkeypatch.setattr(loader, "build_loader", lambda args: Slow(clock))

    def save_preview(path, images, targets):
        previews.append(path)
        clock.now += 2

    def main(rank):
        monkeypatch.setattr(loader.pairs, "save_preview", save_preview)
        monkeypatch.setattr(loader.reduce, "get_rank", lambda: rank)
        monkeypatch.setattr(sys, "argv", ["loader.py", "--device", "cpu", "--preview", "a.png", "--epochs", "2"])
        loader.main(loader.parse_args())
        return len(previews)

    return main


def test_time_is_waiting_or_work_and_the_first_wait_is_the_first(run, capsys):
    """The only work is writing the preview once, which takes 2 seconds."""
    assert run(0) == 1
    assert capsys.readouterr().out.splitlines() == [
        "epoch   1/2  6 pairs  3 batches  8.00 s  1 pairs/s  first batch 4.000 s  waiting 75 % of the time",
        "epoch   2/2  6 pairs  3 batches  6.00 s  1 pairs/s  first batch 4.000 s  waiting 100 % of the time"]


def test_one_process_writes_the_preview(run, capsys):
    assert run(1) == 0 and capsys.readouterr().out == ""


def test_what_a_resumed_pass_leaves_out_is_not_read(tmp_path):
    """The files of the first batch do not exist."""
    file = str(tmp_path / "one.png")
    Image.new("RGB", (9, 9)).save(file)
    pair_list = [("missing.png", "missing.png")] * 2 + [(file, file)] * 2
    cuts = loader.pairs.Cuts(0, 8, 0, train=False)
    pairs = loader.PairLoader(pair_list, cuts, range(4), 2, 0, torch.device("cpu"))
    pairs.set_epoch(3, skip=2)
    assert [images.shape for images, _ in pairs] == [(2, 3, 8, 8)]
    with pytest.raises(errors.ProcessError, match="missing.png"):
        list(pairs)
    with pytest.raises(errors.UsageError, match="set_epoch: 3 pairs are not a multiple of 2"):
        pairs.set_epoch(3, skip=3)


def test_a_large_jpeg_has_the_crops_of_its_target(tmp_path):
    """The JPEG is decoded at a quarter of its size and rotated; the target is upright and decoded at full size."""
    image, target, small = (str(tmp_path / name) for name in ("image.jpg", "target.png", "small.png"))
    coarse = np.random.RandomState(0).randint(0, 256, (12, 18, 3)).astype(np.uint8)
    picture = Image.fromarray(coarse).resize((496, 336), Image.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    picture.rotate(90, expand=True).save(image, exif=exif, quality=95)
    picture.save(target)
    picture.resize((124, 84)).save(small)
    dataset = loader.PairDataset([(image, target)] * 8 + [(image, small)], pairs.Cuts(40, 32, 0, train=True))
    for index in range(8):
        one, other = (part.int() for part in dataset._read(index))
        assert one.shape == (3, 32, 32) and (one - other).abs().max() <= 4
    test = loader.PairDataset([(image, target)], pairs.Cuts(40, 40, 0, train=False))
    reduced, whole = (resize(pixels, [40, 59], antialias=True)[:, :, 10:50]
                      for pixels in (pairs.decode_reduced(image, 40)[0], pairs.decode(image)))
    one, _ = test._read(0)
    assert torch.equal(one, reduced) and not torch.equal(one, whole)
    with pytest.raises(errors.ProcessError, match="image.jpg: 496x336 pixels; .*small.png has 124x84"):
        dataset._read(8)


class Numbered:
    """Batches: a worker counts each one in `done` and then fills its slot with its number."""

    def __init__(self, ring):
        self.ring, self.done = ring, torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self):
        return 40

    def __getitems__(self, indices):
        slot, batch = self.ring.take(1)
        batch.fill_(indices[0])
        self.done += 1
        return slot


@pytest.mark.parametrize("workers", [0, 1])
def test_no_worker_writes_to_the_slot_of_the_batch_that_was_received_last(workers):
    """The worker is as far ahead as possible when it has filled all requested batches, which are two."""
    dataset = Numbered(pairs.Ring(workers, 1, 1))
    reader = DataLoader(dataset, 1, num_workers=workers, collate_fn=lambda slot: slot)
    for number, slot in enumerate(reader):
        deadline = time.monotonic() + 60
        while workers and dataset.done < min(number + 3, len(dataset)):
            assert time.monotonic() < deadline, f"{dataset.done} batches at number {number}"
        assert (dataset.ring.slots[slot] == number).all()
