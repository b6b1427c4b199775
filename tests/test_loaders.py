"""The loaders: their batches on one to three processes, from files whose pixels encode their own position."""
import functools
import importlib
import importlib.util
import re
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import PYTHON, ROOT, STRICT, TORCHRUN, run
from PIL import Image, ImageOps
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import errors
from common.pairs import tars
from common.pairs.pairs import find_pairs

TRAIN, TEST = 23, 11  # pairs: no number of processes or batches divides them
BATCH = 6  # of one, two and three processes
CROP = 16
LEVEL = 1 / 127.5  # one of 255 levels, in [-1, 1]
LARGE = {5: (432, 320), 6: (664, 904)}  # number of a picture: its size

HAS_DALI = bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"))
DALI = [pytest.mark.drill, pytest.mark.skipif(not HAS_DALI, reason="no DALI: pip install -r requirements/dali.txt")]
IN_ORDER = ["loader", pytest.param("loader_DALI", marks=DALI)]  # a pair has one place in an epoch, wherever it is read
LOADERS = [*IN_ORDER, "loader_streaming"]
PROCESSES = [1, 2, 3]


def watch(loader, args):
    return [list(loader) for _ in range(args.epochs)]


def break_off(loader, args):
    seen = [[next(iter(loader))], list(loader)]
    loader.set_epoch(2)
    seen.append(list(loader))
    loader.set_epoch(7, skip=args.batch_size)
    seen.append(list(loader))
    loader.set_epoch(8, skip=(len(loader) - 1) * args.batch_size)
    seen += [list(loader), list(loader)]
    loader.set_epoch(1)
    return seen, [list(loader) for _ in range(9)]


def deliver(script, source, *arguments, use=watch, rank=0, processes=1):
    """Return the length of a script's loader and what `use` reads from it, as one rank of a group."""
    module = importlib.import_module(script)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [script, "--data-source", str(source), "--device", "cpu", *map(str, arguments)])
            args = module.parse_args()
        loader = module.build_loader(args)
        return SimpleNamespace(length=len(loader), epochs=use(loader, args))
    finally:
        dist.destroy_process_group()


def write_marked(folder, **splits):
    """Write pairs whose pixels tell the number of the pair and the side (red), their x (green) and y (blue)."""
    for split, count in splits.items():
        for number in range(count):
            height, width = [(CROP + 3, CROP + 5), (CROP + 10, CROP)][number % 2]
            for side, red in (("img", number), ("gt", 255 - number)):
                pixels = np.empty((height, width, 3), np.uint8)
                pixels[..., 0] = red
                pixels[..., 1], pixels[..., 2] = np.arange(width) * 3, np.arange(height)[:, None] * 3
                path = folder / split / side / f"{number % 3}" / f"{number:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    return write_marked(tmp_path_factory.mktemp("marked"), train=TRAIN, test=TEST)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """JPEG and PNG pictures in colour, CMYK and grey, with a palette or alpha, upright or turned, of many sizes; a GIF.

    Two are so large that loader.py decodes their JPEGs at a half and a quarter of their size.
    """
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.RandomState(0)
    for split, count in (("train", 13), ("test", 7)):
        for number in range(count):
            width, height = LARGE.get(number, [(190, 120), (110, 201), (97, 64), (60, 50), (151, 151)][number % 5])
            cell = 24 if number in LARGE else 6
            coarse = random.randint(0, 255, (height // cell, width // cell, 3)).astype(np.uint8)
            picture = Image.fromarray(coarse).resize((width, height), Image.BICUBIC)
            for side, extension in (("img", "jpg"), ("gt", "png" if number % 2 else "JPEG")):
                path = folder / split / side / f"{number}.{extension}"
                path.parent.mkdir(parents=True, exist_ok=True)
                one, form = picture.convert("L") if number % 4 == 3 else picture, None
                if extension == "png" and number in (1, 5):
                    one = picture.convert("RGBA") if number == 1 else picture.quantize(64)
                exif = Image.Exif()
                if number in (0, 4, 6) and extension != "png":
                    exif[0x0112] = {0: 6, 4: 3, 6: 5}[number]
                if extension == "jpg" and number in (1, 2):
                    one, form = (one.convert("CMYK"), None) if number == 1 else (one.convert("L"), "GIF")
                one.save(path, form, quality=90, exif=exif)
    return folder


def sharded(folder, files, per_shard=4):
    """Write the splits of a folder of pairs to shards, and return their folder."""
    for split in sorted(path.name for path in files.iterdir()):
        tars.write_shards(find_pairs(files, split, "img", "gt"), folder, split, per_shard)
    return folder


@pytest.fixture(scope="module")
def seen(tmp_path_factory, marked, pictures):
    """Return a function from a script and its number of processes, 1 to 3, to {name: [result of each rank]}."""
    base = tmp_path_factory.mktemp("seen")
    few = write_marked(base / "few", test=1)

    def jobs_of(script, processes):
        sets = [marked, few, pictures]
        if script == "loader_streaming":
            sets = [sharded(base / f"shards-{processes}-{number}", files) for number, files in enumerate(sets)]
        marked_set, few_set, picture_set = sets
        cuts, two = [marked_set, "--resize", 0, "--crop", CROP, "--batch-size"], ["--workers", 2]
        yield "train", [*cuts, BATCH, "--workers", 0, "--epochs", 12 if processes == 1 else 2], watch
        yield "test", [*cuts, BATCH, "--workers", 0, "--split", "test"], watch
        if processes == 1:
            yield "workers", [*cuts, BATCH, *two], watch
            yield "test-workers", [*cuts, BATCH, *two, "--split", "test"], watch
            yield "seed", [*cuts, BATCH, "--workers", 0, "--seed", 5], watch
            yield "broken", [*cuts, BATCH, "--workers", 0], break_off
            yield "broken-workers", [*cuts, 4, *two], break_off
            for split in "train", "test":
                yield f"pictures-{split}", [picture_set, "--split", split, "--resize", 72, "--crop", 64, "--batch-size",
                                            4, "--workers", 0], watch
        if processes == 2:
            yield "few", [few_set, *cuts[1:], BATCH, "--workers", 1, "--split", "test"], watch

    @functools.cache
    def get(script, processes):
        return {name: [deliver(script, *arguments, use=use, rank=rank, processes=processes)
                       for rank in range(processes)] for name, arguments, use in jobs_of(script, processes)}

    return get


def describe(images, side):
    """Return (number, top, left, flipped across, flipped up) of each image of a batch of the marked set."""
    levels = ((images + 1) * 127.5).round().long()
    described = []
    for red, x, y in levels:
        assert red.min() == red.max(), "pixels of two pictures in one"
        across, up = bool(x[0, 0] > x[0, -1]), bool(y[0, 0] > y[-1, 0])
        x, y = (x.flip(1) if across else x), (y.flip(0) if up else y)
        grid = torch.arange(CROP)
        assert (x == x[0, 0] + 3 * grid).all() and (y == y[0, 0] + 3 * grid[:, None]).all(), "not one piece"
        number = red[0, 0].item()
        number = number if side == "img" else 255 - number
        described.append((number, y[0, 0].item() // 3, x[0, 0].item() // 3, across, up))
    return described


def batches(epoch):
    """Return the pairs in the batches of one epoch; check that both images of each pair belong together."""
    found = []
    for inputs, targets in epoch:
        assert all(part.dtype == torch.float32 and part.is_contiguous() for part in (inputs, targets))
        cuts = describe(inputs, "img")
        assert cuts == describe(targets, "gt")
        found.append(cuts)
    return found


def flat(epoch):
    return [cut for batch in batches(epoch) for cut in batch]


def numbers(epoch):
    return [cut[0] for cut in flat(epoch)]


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("script", LOADERS)
def test_the_test_split_is_delivered_exactly_once(seen, script, processes):
    ranks = seen(script, processes)["test"]
    if processes == 1:
        assert sorted(numbers(seen(script, 1)["test-workers"][0].epochs[0])) == list(range(TEST))
    for epoch in range(2):
        shares = [numbers(result.epochs[epoch]) for result in ranks]
        assert sorted(sum(shares, [])) == list(range(TEST))
        for rank, (result, share) in enumerate(zip(ranks, shares, strict=True)):
            sizes = [len(inputs) for inputs, _ in result.epochs[epoch]]
            full, rest = divmod(len(share), BATCH // processes)
            assert sizes == [BATCH // processes] * full + [rest] * (rest > 0)
            assert result.length == len(sizes) and len(share) == len(range(rank, TEST, processes))


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("script", LOADERS)
def test_the_shares_of_the_train_split_are_even_and_disjoint(seen, script, processes):
    for epoch in range(2):
        shares = [numbers(result.epochs[epoch]) for result in seen(script, processes)["train"]]
        assert [len(share) for share in shares] == [TRAIN // BATCH * BATCH // processes] * processes
        assert len(set(sum(shares, []))) == TRAIN // BATCH * BATCH
        assert {result.length for result in seen(script, processes)["train"]} == {TRAIN // BATCH}


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("script", IN_ORDER)
def test_any_number_of_processes_and_workers_reads_the_same_batches(seen, script, processes):
    alone = seen("loader", 1)["train"][0].epochs
    for epoch in range(2):
        whole = [sorted(batch) for batch in batches(alone[epoch])]
        shares = [batches(result.epochs[epoch]) for result in seen(script, processes)["train"]]
        assert [sorted(sum(parts, [])) for parts in zip(*shares, strict=True)] == whole
        assert batches(seen(script, 1)["workers"][0].epochs[epoch]) == batches(alone[epoch])
    test = batches(seen("loader", 1)["test"][0].epochs[0])
    assert batches(seen(script, 1)["test-workers"][0].epochs[1]) == test
    assert batches(seen(script, 1)["test"][0].epochs[1]) == test


@pytest.mark.parametrize("script", LOADERS)
def test_each_epoch_has_an_order_and_crops_of_its_own_and_a_seed_repeats_them(seen, script):
    epochs = seen(script, 1)["train"][0].epochs
    orders = [tuple(numbers(epoch)) for epoch in epochs]
    assert len(set(orders)) == len(epochs)
    cuts = [{cut[0]: cut[1:] for cut in flat(epoch)} for epoch in epochs[:2]]
    both = cuts[0].keys() & cuts[1].keys()
    assert sum(cuts[0][number] == cuts[1][number] for number in both) < len(both) / 2
    assert len({cut[3:] for cut in flat(epochs[0])}) > 1, "one draw for the whole epoch"
    other = seen(script, 1)["seed"][0].epochs[0]
    assert numbers(other) != list(orders[0])
    assert {cut[0]: cut[1:] for cut in flat(other)} != cuts[0]


@pytest.mark.parametrize("script", LOADERS)
def test_every_offset_and_every_flip_is_reached_on_train_and_the_centre_on_test(seen, script):
    cuts = [cut for epoch in seen(script, 1)["train"][0].epochs for cut in flat(epoch)]
    landscape, portrait = ([cut for cut in cuts if cut[0] % 2 == kind] for kind in range(2))
    assert {cut[1] for cut in landscape} == set(range(4)) and {cut[2] for cut in landscape} == set(range(6))
    assert {cut[1] for cut in portrait} == set(range(11)) and {cut[2] for cut in portrait} == {0}
    assert {cut[3:] for cut in cuts} == {(False, False), (False, True), (True, False), (True, True)}
    for _, top, left, across, up in flat(seen(script, 1)["test"][0].epochs[0]):
        assert (top, left) in ((2, 2), (5, 0)) and not across and not up


@pytest.mark.parametrize("script", LOADERS)
def test_a_pass_broken_off_and_a_chosen_epoch_are_those_of_a_whole_run(seen, script):
    for name in ("broken", "broken-workers"):
        (first, second, again, seventh, rest, ninth), whole = seen(script, 1)[name][0].epochs
        whole = [batches(epoch) for epoch in whole]
        assert batches(first) == whole[0][:1]
        assert batches(second) == whole[1] and batches(again) == whole[1] and batches(seventh) == whole[6][1:]
        assert len(whole[7]) > 2 and batches(rest) == whole[7][-1:] and batches(ninth) == whole[8]


@pytest.mark.parametrize("script", LOADERS)
def test_pixels_are_those_of_an_antialiased_resize_of_the_shorter_side(seen, script, pictures):
    """Against PIL's resize, on the centre crop; two levels of 255 for two decoders and two roundings, or four."""
    [result] = seen(script, 1)["pictures-test"]
    for side, parts in zip(("img", "gt"), zip(*result.epochs[0], strict=True), strict=True):
        for number, image in enumerate(torch.cat(parts)):
            [path] = (pictures / "test" / side).glob(f"{number}.*")
            picture = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
            shorter = min(picture.size)
            picture = picture.resize([72 * length // shorter for length in picture.size], Image.BILINEAR)
            left, top = (round((length - 64) / 2) for length in picture.size)
            expected = np.array(picture.crop((left, top, left + 64, top + 64)))
            expected = torch.from_numpy(expected).permute(2, 0, 1)
            limit = 4.5 if number in LARGE else 2.5
            assert ((image + 1) * 127.5 - expected).abs().max() < limit, path


@pytest.mark.parametrize("split", [pytest.param(split, marks=DALI) for split in ("train", "test")])
def test_both_loaders_deliver_the_same_pixels(seen, split):
    """To one level of 255: DALI resizes from the window of the crop, torchvision resizes all and cuts.

    To four levels in the outermost rows and columns, where DALI may leave out a pixel of its filter, and in the three
    large JPEGs, which loader.py decodes at a reduced scale.
    """
    left, right = (seen(script, 1)[f"pictures-{split}"][0].epochs for script in ("loader", "loader_DALI"))
    for one, other in zip(left, right, strict=True):
        mine, its = (torch.cat(sum(map(list, epoch), [])) for epoch in (one, other))
        difference = (mine - its).abs()
        inside = difference[:, :, 1:-1, 1:-1].amax((1, 2, 3)).sort().values
        assert inside[-4] < 1.01 * LEVEL and difference.max() < 4.01 * LEVEL


@pytest.mark.parametrize("script", LOADERS)
def test_a_process_may_have_no_pair_to_test(seen, script):
    assert [(numbers(result.epochs[0]), result.length) for result in seen(script, 2)["few"]] == [([0], 1), ([], 0)]


def spoil(folder, case):
    """Write a set of four pairs that cannot be used; return the file to be named."""
    picture = Image.fromarray(np.random.RandomState(1).randint(0, 255, (90, 120, 3)).astype(np.uint8))
    for side in ("img", "gt"):
        for number in range(4):
            path = folder / "train" / side / "a" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    image, target = (folder / "train" / side / "a" / "2.jpg" for side in ("img", "gt"))
    if case == "orphans":  # as many on either side: matched by position they would pass
        return image.rename(image.with_name("7.jpg"))
    if case == "orphan target":
        image.unlink()
        return target
    if case == "ambiguous":
        picture.save(image.with_suffix(".png"))
        return image.with_suffix(".png")
    if case == "no folder":
        (folder / "train" / "gt").rename(folder / "train" / "other")
        return folder / "train" / "gt"
    if case == "truncated":
        image.write_bytes(image.read_bytes()[:-2])
    if case == "two sizes":
        picture.resize((90, 120)).save(target)
    if case == "too small":
        for path in (image, target):
            picture.resize((63, 100)).save(path)
    return image


WRONG_SETS = ["orphans", "orphan target", "ambiguous", "no folder"]
BAD_FILES = ["truncated", "two sizes", "too small"]  # others: unit/test_images.py


@pytest.mark.parametrize("case", WRONG_SETS + BAD_FILES)
@pytest.mark.parametrize("script", IN_ORDER)
def test_what_cannot_be_used_is_named(tmp_path, script, case):
    """In this process, or in a worker."""
    named = spoil(tmp_path, case)
    error = errors.UsageError if case in WRONG_SETS else errors.ProcessError
    for workers in (0, 1) if case == "truncated" else (0,):
        with pytest.raises(error, match=re.escape(str(named))):
            deliver(script, tmp_path, "--resize", 0, "--crop", 64, "--batch-size", 2, "--workers", workers)


@pytest.fixture(scope="module")
def launched(once):
    """Return a function that launches a loader once on its samples: name to (folder, result).

    On two processes, as in README, loader.py in a terminal; loader_DALI.py runs on one.
    """
    def get(script):
        size = {"TQDM_NCOLS": "80", "TQDM_NROWS": "24", **STRICT}  # the terminal that `run` opens has none
        launcher, split = [*TORCHRUN, "--nproc-per-node=2"], "train"
        if script == "loader_DALI":
            launcher, split = [PYTHON], "test"
        command = [*launcher, ROOT / f"{script}.py", "--split", split, "--workers", "1", "--preview", "out/pairs.png",
                   "--epochs", "3", "--device", "cpu"]
        return once(script, lambda folder: run(*command, cwd=folder, terminal=script == "loader", env=size))

    return get


@pytest.mark.parametrize("script", LOADERS)
def test_the_scripts_run_on_samples_of_their_own(launched, script):
    folder, said = launched(script)
    paths = sorted(folder.glob("data/pairs/*/*/*/*.jpg"))
    blurred, sharp = (sum(path.stat().st_size for path in paths if side in path.parts) for side in ("img", "gt"))
    assert blurred < 0.8 * sharp
    assert [sum(part in str(path) for path in paths) for part in ("train/img", "test/gt")] == [29, 7]
    assert {np.sign(np.subtract(*Image.open(path).size)) for path in paths} >= {-1, 1}  # portraits and landscapes
    lines = [line for line in said.out.splitlines() if line.strip()]
    found = [re.fullmatch(r"epoch +(\d)/3  (\d+) pairs  (\d+) batches  [\d.]+ s  [\d,]+ pairs/s  "
                          r"first batch [\d.]+ s  waiting \d+ % of the time", line) for line in lines]
    assert all(found) and [match[1] for match in found] == ["1", "2", "3"]
    counts = ("24", "3") if script != "loader_DALI" else ("7", "1")
    assert all((match[2], match[3]) == counts for match in found)
    assert ("epoch 1: " in said.err) == (script == "loader"), "no progress bar, or one that is no terminal's"
    with Image.open(folder / "out/pairs.png") as image:
        columns = 4 if script != "loader_DALI" else 7  # two processes share the batch of 8
        assert image.size == (2 + columns * 226, 2 + 2 * 226)


def test_dali_is_an_extra(alone, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["loader_DALI.py"])
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(str(ROOT / "loader_DALI.py"), run_name="__main__")
    said, = capsys.readouterr().err.splitlines()
    assert "pip install -r requirements/dali.txt" in said
