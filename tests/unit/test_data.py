"""Datasets: splits, augmentation and normalization, and the files that datasets of pairs write."""
import json
import multiprocessing
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset, TensorDataset

from common import datasets, launch, loading, models
from common.cli import explain
from common.errors import ProcessError, UsageError
from common.image_folder import FolderDataset
from common.pairs import pairs

PICTURE = Image.new("RGB", (4, 4))


def test_a_fifth_of_each_class_is_kept_for_validation():
    labels = np.repeat([0, 1, 2], [10, 100, 40])
    np.random.RandomState(1).shuffle(labels)
    train, val = loading.split_by_class(labels)
    assert sorted([*train, *val]) == list(range(150))
    assert np.bincount(labels[val]).tolist() == [2, 20, 8]


def test_what_a_crop_has_beyond_the_image_is_black():
    images = torch.full((300, 3, 32, 32), 200, dtype=torch.uint8)
    data = datasets.ArrayDataset("cifar10", images, torch.zeros(300, dtype=torch.int64), 0, augment=True)
    batch, _ = data.__getitems__(range(300))
    assert batch.unique().tolist() == [0, 200]
    assert (batch[:, :, 4:-4, 4:-4] == 200).all()  # 4 pixels at most


def test_each_sample_has_crops_and_flips_of_its_own():
    """All 81 offsets and both flips occur about equally often; a marked pixel in the corner shows which."""
    count = 8100
    images = torch.zeros(count, 3, 32, 32, dtype=torch.uint8)
    images[:, :, 10, 12] = 255  # after a crop at (top, left) it is at (14 - top, 16 - left), or mirrored
    data = datasets.ArrayDataset("cifar10", images, torch.zeros(count, dtype=torch.int64), 0, augment=True)
    seen = []
    for epoch in (1, 2):
        data.set_epoch(epoch)
        batch, _ = data.__getitems__(list(range(count)))
        seen.append(batch[:, 0].flatten(1).max(1).indices)
        assert (batch[:, 0].flatten(1).sum(1) == 255).all()  # it is in every crop, once
    places, counts = seen[0].unique(return_counts=True)
    rows, columns = places // 32, places % 32
    assert rows.unique().tolist() == list(range(6, 15))
    assert set(columns.tolist()) == {*range(8, 17), *(31 - column for column in range(8, 17))}
    assert len(places) == 9 * 16  # columns 8 to 16, and mirrored 15 to 23: 15 and 16 are reached both ways
    assert counts.max() < 4 * counts.float().mean()
    assert (seen[0] != seen[1]).float().mean() > 0.9


def test_batches_depend_on_seed_epoch_and_index_but_not_on_processes_or_workers():
    images = torch.randint(256, (62, 3, 32, 32), dtype=torch.uint8)
    data = datasets.ArrayDataset("cifar10", images, torch.zeros(62, dtype=torch.int64), 7, augment=True)
    found = {1: [], 2: []}
    for processes, workers in (1, 0), (1, 1), (2, 0), (2, 2):
        samplers = [DistributedSampler(data, processes, rank, seed=7, drop_last=True) for rank in range(processes)]
        options = loading.options(workers, torch.device("cpu"), data) | {"drop_last": True}
        loaders = [DataLoader(data, 12 // processes, sampler=sampler, **options) for sampler in samplers]
        for epoch, seen in found.items():
            data.set_epoch(epoch)
            for sampler in samplers:
                sampler.set_epoch(epoch)
            shares = [[batch for batch, _ in loader] for loader in loaders]
            seen.append(torch.stack([torch.stack(batch, 1).flatten(0, 1) for batch in zip(*shares, strict=True)]))
    for first, *others in found.values():
        assert first.shape[:2] == (5, 12) and len(first.flatten(0, 1).flatten(1).unique(dim=0)) == 60
        assert all(torch.equal(first, other) for other in others)
    assert not any(map(torch.equal, found[1][0], found[2][0]))
    other = datasets.ArrayDataset("cifar10", images, torch.zeros(62, dtype=torch.int64), 8, augment=True)
    other.set_epoch(2)
    assert not torch.equal(*[part.__getitems__(range(62))[0] for part in (other, data)])


def test_two_files_of_one_picture_are_cropped_differently_and_an_epoch_repeats_it(tmp_path):
    picture = np.random.RandomState(0).randint(0, 256, (60, 60, 3)).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "0.png")
    views = {}
    for seed, epoch in ((0, 1), (0, 2), (1, 2), (0, 1)):
        data = FolderDataset([(str(tmp_path / "0.png"), 0)] * 4, ["a"], [0.5], [0.5], seed, augment=True)
        data.set_epoch(epoch)
        images, _ = data.__getitems__(range(4))
        assert torch.equal(images, views.setdefault((seed, epoch), images))
    assert len(torch.cat([*views.values()]).flatten(1).unique(dim=0)) == 12


def write_images(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        PICTURE.save(folder / name)
    return folder


def test_folders_of_systems_are_no_classes_and_images_outside_of_classes_are_counted(tmp_path, capsys):
    """One class has what a NAS writes next to its files; the other has kinds of files that Pillow decodes."""
    folder = write_images(tmp_path / "a", *(f"ash/{n}.jpg" for n in range(4)), "@eaDir/0.jpg", "lost+found/9.jpg",
                          "ash/@eaDir/0.jpg/SYNOPHOTO_THUMB_M.jpg", "overview.png",
                          *(f"oak/0.{kind}" for kind in ("jfif", "jpe", "bmp", "tif", "tiff", "gif")))
    (folder / "oak" / "1.heic").touch()
    (folder / "oak" / "000001").touch()
    train, val = datasets.create_datasets("folder", folder, 0)
    assert train.classes == ["ash", "oak"] and (len(train), len(val)) == (8, 2)
    files = sorted(os.fsdecode(path) for path in [*train.paths, *val.paths])
    assert [os.path.relpath(path, folder) for path in files] == [
        "ash/0.jpg", "ash/1.jpg", "ash/2.jpg", "ash/3.jpg", "oak/0.bmp", "oak/0.gif", "oak/0.jfif", "oak/0.jpe",
        "oak/0.tif", "oak/0.tiff"]
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: these files are not used: 1 without an extension, 1 .heic",
        f"{folder}: 1 images are in no class folder, so not used"]


def test_only_the_training_images_of_a_folder_are_augmented(tmp_path):
    noise = Image.effect_noise((300, 300), 90)
    for name in ("ash", "oak"):
        (tmp_path / name).mkdir()
        for number in range(5):
            noise.save(tmp_path / name / f"{number}.png")
    parts = datasets.create_datasets("folder", tmp_path, seed=0)
    same = []
    for part in parts:
        images = []
        for epoch in (1, 2):
            part.set_epoch(epoch)
            images.append(part[0][0])
        same.append(torch.equal(*images))
    assert same == [False, True]


@pytest.mark.parametrize(("names", "said"), [
    (["photos/ash/0.png", "photos/oak/0.png"], "--data-path: {} has only one subfolder, 'photos'; .*at least two"),
    (["train/photos/ash/0.png", "val/photos/ash/0.png"], "{}/train has only one subfolder, 'photos'; "),
    (["ash/0.png", "@eaDir/0.jpg"], "{} has only one subfolder, 'ash'; "),
    (["train/ash/0.png", "train/oak/0.png", "test/ash/0.png"], "{}: test and train are no classes; .*train/ and val/"),
    (["train/0.png", "test1/0.png"], "{}: test1 and train are no classes; "),  # Kaggle's dogs and cats
    (["seg_train/0.png", "seg_test/0.png", "seg_pred/0.png"], "{}: seg_pred and seg_test and seg_train are no "),
    (["TrainImages/0.png", "TestImages/0.png"], "{}: TestImages and TrainImages are no classes; "),
    (["images/0.png", "masks/0.png"], "{}: images and masks are no classes; "),
    (["train/0.png"], "{} has only one subfolder, 'train'; .*or train/ and val/ with these"),
    ([f"{name}/{part}/{n}.png" for name in ("cat", "dog") for part in ("train", "val") for n in range(5)],
     "{}: classes are divided into train and val; "),
    (["Train/ash/0.png", "Val/ash/0.png", "more/0.png"], "{}: Train and Val are no classes; "),
    (["training/ash/0.png", "validation/ash/0.png"], "{}: training and validation are no classes; ")])
def test_a_folder_that_contains_no_classes_is_refused(tmp_path, names, said):
    with pytest.raises(UsageError, match=said.format(write_images(tmp_path, *names))):
        datasets.create_datasets("folder", tmp_path, 0)


def test_names_that_differ_only_in_case_are_two_classes_with_a_warning(tmp_path, capsys):
    names = [f"{name}/{n}.png" for name in ("Cat", "cat ", "dog") for n in range(5)]
    assert datasets.create_datasets("folder", write_images(tmp_path, *names), 0)[0].classes == ["Cat", "cat ", "dog"]
    said, = capsys.readouterr().out.splitlines()
    assert said == f"--data-path {tmp_path}: two classes are called 'Cat' and 'cat '; if they are one, merge them"


def test_a_class_may_be_spelled_in_two_ways(tmp_path):
    """As on macOS and elsewhere: an accent of its own, or one letter."""
    names = ["train/caf\u00e9/0.png", "train/tea/0.png", "val/cafe\u0301/0.png", "val/tea/0.png"]
    train, val = datasets.create_datasets("folder", write_images(tmp_path, *names), 0)
    assert train.classes == val.classes == ["caf\u00e9", "tea"] and val.labels.tolist() == [0, 1]


def test_a_class_may_have_the_name_of_a_part(tmp_path):
    """A train, for example, among other vehicles."""
    for classes in (["bus", "train"], ["test_negative", "test_positive"], ["train_interior", "valley", "wheat_field"],
                    ["freight_train", "passenger_train", "tram"]):
        names = [f"{classes[0]}/{name}/{n}.png" for name in classes for n in range(5)]
        folder = write_images(tmp_path, *names) / classes[0]
        assert datasets.create_datasets("folder", folder, 0)[0].classes == classes


def test_images_in_subfolders_of_a_class_are_used_and_said(tmp_path, capsys):
    """As in Tiny ImageNet."""
    names = [f"{name}/images/{n}.png" for name in ("n01443537", "n01629819") for n in range(5)]
    assert len(datasets.create_datasets("folder", write_images(tmp_path, *names), 0)[0]) == 8
    assert capsys.readouterr().out == f"{tmp_path}: images in subfolders of the classes are used, too: images\n"


class Samples(list):
    """A reader's own dataset, with the given samples and attributes."""

    def __init__(self, samples, **attributes):
        super().__init__(samples)
        self.__dict__.update(attributes)


def first_batch(dataset, workers=0, timeout=0):
    options = loading.options(workers, torch.device("cpu"), dataset)
    try:
        return next(iter(DataLoader(dataset, 3, timeout=timeout, **options)))
    finally:
        for worker in multiprocessing.active_children():
            worker.terminate()  # torch would wait for 5 s for one that could not send its batch


INPUTS, TARGETS = torch.arange(12.0).reshape(4, 3), torch.arange(4)


@pytest.mark.parametrize("dataset", [
    TensorDataset(INPUTS, TARGETS),
    torch.utils.data.StackDataset(INPUTS, TARGETS),  # its __getitems__ returns a list of samples, as torch expects
    Subset(TensorDataset(INPUTS, TARGETS), [0, 1, 2]),
    Subset(Subset(TensorDataset(INPUTS, TARGETS), [3, 0, 1, 2]), [1, 2, 3]),
    ConcatDataset([TensorDataset(INPUTS[:2], TARGETS[:2]), TensorDataset(INPUTS[2:], TARGETS[2:])]),
    Samples([(row.numpy(), label) for label, row in enumerate(INPUTS)]),
    Samples([[row, np.int64(label)] for label, row in enumerate(INPUTS)]),
], ids=["tensors", "__getitems__", "subset", "subset of a subset", "concatenated", "arrays and numbers", "lists"])
def test_samples_of_any_dataset_become_a_batch(dataset):
    inputs, targets = first_batch(dataset)
    assert torch.equal(inputs, INPUTS[:3]) and torch.equal(targets, TARGETS[:3])
    datasets.set_epoch(dataset, 1)  # none of them has one


def test_a_whole_batch_stays_as_it_is_in_a_subset_too():
    train, _ = datasets.create_datasets("digits", "", 0)
    for dataset, first in (train, 0), (Subset(train, [5, 6, 7]), 5):
        images, labels = first_batch(dataset)
        assert torch.equal(images, train.images[first:first + 3])
        assert torch.equal(labels, train.labels[first:first + 3])


def test_numbers_have_the_type_of_the_weights():
    inputs, targets = first_batch(Samples([(1.5, np.float64(2.5))] * 3))
    assert inputs.dtype == targets.dtype == torch.get_default_dtype()
    inputs, _ = first_batch(Samples([(np.ones(2), 0)] * 3))
    assert inputs.dtype == torch.float64  # an array keeps its type


@pytest.mark.parametrize(("samples", "error", "said"), [
    ([(PICTURE, 0)] * 3, UsageError, r"a PIL\.Image\.Image and a int; .*ToTensor"),
    ([{"x": 1, "y": 2}] * 3, UsageError, r"a dict of 2; .*tuple \(input, target\)"),
    ([(1, 2, 3)] * 3, UsageError, "a tuple of 3; "), ([(1, 2), None, (1, 2)], UsageError, "a NoneType; .*a tuple"),
    ([torch.zeros(2)] * 3, UsageError, r"a torch\.Tensor; "),
    ([((torch.zeros(2), torch.zeros(2)), 0)] * 3, UsageError, "a tuple of 2 and a int; .*one tensor each"),
    ([(torch.zeros(2), "cat")] * 3, UsageError, "a torch.Tensor and a str; .*one tensor each"),
    ([(torch.zeros(size), 0) for size in (2, 3, 2)], ProcessError, r"differ in shape: .*\[2\].*collate_fn"),
], ids=["PIL", "dict", "three", "none", "input only", "two inputs", "text", "ragged"])
def test_a_sample_that_does_not_fit_is_named_in_one_line(samples, error, said):
    with pytest.raises(error, match=said) as raised:
        first_batch(Samples(samples))
    assert "\n" not in str(raised.value)


def test_a_worker_says_it_in_one_line_too():
    with pytest.raises(UsageError) as raised:
        first_batch(Samples([(PICTURE, 0)] * 3), workers=1)
    assert explain(raised.value).startswith("a sample is a PIL.Image.Image")


class Batches(Samples):
    """A dataset that returns itself as every batch."""

    def __getitems__(self, indices):
        return tuple(self)


def test_a_batch_that_a_worker_cannot_send_is_an_error_and_no_hang():
    with pytest.raises(Exception, match="(?i)can't pickle"):
        first_batch(Batches([INPUTS, lambda: 0, 0]), workers=1, timeout=30)


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux do workers send tensors through sockets")
def test_a_tmpdir_too_long_for_sockets_is_named(tmp_path, monkeypatch):
    folder = tmp_path / ("j" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)  # a cache of it
    with pytest.raises(OSError) as raised:
        first_batch(Batches([INPUTS, TARGETS, 0]), workers=1, timeout=30)
    said = explain(raised.value)
    assert said == f"TMPDIR {folder}: too long for the sockets of loader workers; set a shorter TMPDIR"


class Epochs(Samples):
    """A dataset that remembers its epoch without shared memory."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return super().__getitem__(index), self.epoch


def test_workers_see_the_epoch_of_any_dataset():
    inner = Epochs([0, 1])
    for dataset in (inner, Subset(inner, [1, 0]), ConcatDataset([TensorDataset(TARGETS, TARGETS), inner])):
        loader = DataLoader(dataset, 1, **loading.options(1, torch.device("cpu"), dataset))
        for epoch in (1, 2):
            datasets.set_epoch(dataset, epoch)
            assert [targets.item() for _, targets in loader][-1] == epoch
    train, _ = datasets.create_datasets("digits", "", 0)
    for dataset in (train, Subset(train, [0]), Samples([1])):  # these workers need not start again
        assert loading.options(1, torch.device("cpu"), dataset)["persistent_workers"]


def test_each_set_has_as_many_workers_as_it_needs():
    """Without augmentation, a dataset in memory needs no workers; files must always be decoded."""
    images, labels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    free = launch.cores_per_process() - 1
    for augment, most in (True, 2), (False, 0):
        in_memory = datasets.ArrayDataset("cifar10", images, labels, 0, augment=augment)
        files = FolderDataset([("0.png", 0)], ["a"], [0.5], [0.5], 0, augment=augment)
        for dataset, expected in (in_memory, min(most, free)), (Subset(in_memory, [0]), min(most, free)), (
                files, min(8, free)):
            assert loading.options(None, torch.device("cpu"), dataset)["num_workers"] == expected
        options = loading.options(3, torch.device("cpu"), in_memory)
        assert options["num_workers"] == 3  # --workers wins
        assert options["worker_init_fn"] is launch.tie_worker  # or a killed process would leave its workers behind


BYTES = torch.tensor([0, 255], dtype=torch.uint8).repeat(6).reshape(2, 1, 2, 3).expand(2, 3, 2, 3)


@pytest.mark.parametrize(("attributes", "low", "high"), [
    ({}, [0, 0, 0], [1, 1, 1]),
    ({"mean": (0.5, 0.25, 0), "std": (0.5, 0.5, 1)}, [-1, -0.5, 0], [1, 1.5, 1]),
    ({"mean": 0.5, "std": np.float32(0.5)}, [-1, -1, -1], [1, 1, 1]),
    ({"mean": torch.tensor([0.5]), "std": [0.25]}, [-2, -2, -2], [2, 2, 2]),
    # no statistics of pixels in [0, 1]: methods, prices, numbers out of range, nothing to divide by, one of two
    *[(attributes, [0, 0, 0], [1, 1, 1]) for attributes in (
        {"mean": len, "std": len}, {"mean": 21000.0, "std": 400.0}, {"mean": 0.3, "std": 65.0},
        {"mean": 125.0, "std": 0.3}, {"mean": -0.5, "std": 0.5}, {"mean": 0.5, "std": 0.0}, {"mean": 0.5})],
], ids=["nothing", "channels", "numbers", "one each", "methods", "prices", "wide", "bright", "negative",
       "no spread", "no std"])
def test_images_of_bytes_are_scaled(attributes, low, high):
    for dataset in (Samples([], **attributes), Subset(Samples([], **attributes), [])):
        values = datasets.Normalize(dataset)(BYTES)
        assert values.dtype == torch.get_default_dtype()
        assert torch.allclose(values.amin((0, 2, 3)), torch.tensor(low, dtype=values.dtype))
        assert torch.allclose(values.amax((0, 2, 3)), torch.tensor(high, dtype=values.dtype))


@pytest.mark.parametrize("inputs", [
    torch.rand(2, 5), torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4).half(), torch.arange(6).reshape(2, 3),
    torch.zeros(2, 5, dtype=torch.uint8)], ids=["table", "images", "half", "tokens", "table of bytes"])
def test_what_is_no_image_of_bytes_is_not_touched(inputs):
    normalize = datasets.Normalize(Samples([], mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)))
    assert normalize(inputs) is inputs


def test_statistics_of_other_channels_are_refused():
    """Broadcasting would turn one channel into three."""
    normalize = datasets.Normalize(Samples([], mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)))
    with pytest.raises(UsageError, match="mean and std have 3 values; its images have 1 channels"):
        normalize(BYTES[:, :1])


def test_nothing_is_written_into_a_folder_that_needs_no_download(tmp_path):
    """It may be read-only, and then not even a lock can be written."""
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    for part, count in ("train", 6), ("t10k", 2):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 28, 0, 0, 0, 28])
                                                        + bytes(range(count)) * 784)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, count, *range(count)]))
    tmp_path.chmod(0o555)
    train, val = datasets.create_datasets("mnist", tmp_path, 0)
    assert train.labels.tolist() == [*range(6)] and val.images.shape == (2, 1, 28, 28)
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]


def test_samples_that_exist_are_not_created_again(tmp_path):
    (tmp_path / "pairs").mkdir()
    tmp_path.chmod(0o555)
    pairs.create_once(tmp_path / "pairs", None)
    assert [path.name for path in tmp_path.iterdir()] == ["pairs"]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(100))

    def __len__(self):
        return 100


@pytest.mark.parametrize(("train", "val", "said"), [
    (Samples([0] * 3), Samples([0]), "--batch-size 4: there are only 3 samples"),
    (Samples([0] * 4), Samples([]), "the validation set has no samples"),
    (Stream(), Samples([0]), "Stream: .*map-style datasets with a length"),
    (Samples([0] * 4), iter([0]), "list_iterator: .*map-style datasets with a length")])
def test_datasets_that_cannot_be_trained_on_are_refused(train, val, said):
    with pytest.raises(UsageError, match=said):
        datasets.require_samples(train, val, 4)


def test_a_class_whose_name_is_not_utf_8_is_saved(tmp_path):
    name = "ch\udceane"  # as os.fsdecode returns a byte of Latin-1
    datasets.save_classes(Samples([], classes=[name, "h\xeatre"]), tmp_path)
    text = (tmp_path / "class_indices.json").read_text("utf-8")
    assert json.loads(text) == {"0": name, "1": "h\xeatre"} and "h\xeatre" in text


IMAGE = torch.zeros(3, 32, 32)


@pytest.mark.parametrize(("dataset", "found"), [
    (Samples([(IMAGE, 0)], classes=["ash", "oak"]), (["ash", "oak"], (3, 32, 32))),  # as torchvision's have it
    (Samples([(IMAGE, 0)], classes=["ash", "oak"], num_classes=3), (3, (3, 32, 32))),
    (Samples([], num_classes=7, image_shape=(1, 28, 28)), (7, (1, 28, 28))),
    (Subset(Samples([(IMAGE, 0)], classes=["ash", "oak"]), [0]), (["ash", "oak"], (3, 32, 32))),
    (Subset(datasets.create_datasets("digits", "", 0)[0], [0]), (10, (1, 28, 28)))])
def test_the_classes_and_the_shape_follow_from_the_dataset(dataset, found):
    assert datasets.classes_and_shape(dataset) == found
    models.create_model("cnn", *found)


def test_the_names_of_the_classes_are_saved_if_the_dataset_has_them(tmp_path):
    datasets.save_classes(Samples([]), tmp_path)
    assert not [*tmp_path.iterdir()]
    datasets.save_classes(Subset(Samples([(IMAGE, 0)], classes=["ash", "wei\u00dfbuche"]), [0]), tmp_path)
    text = (tmp_path / "class_indices.json").read_text("utf-8")
    assert text == '{\n    "0": "ash",\n    "1": "wei\u00dfbuche"\n}\n'


@pytest.mark.parametrize(("dataset", "said"), [
    (TensorDataset(torch.zeros(2, 3, 32, 32), TARGETS[:2]), "number of classes; set train_set.num_classes = NUMBER"),
    (TensorDataset(INPUTS, TARGETS), r"of shape \(C, H, W\); those of this dataset are \(3,\).*# yours: the model"),
    (Samples([(torch.zeros(32, 32, 3), 0)], classes="ab"), r"are \(32, 32, 3\); permute them"),
    (Samples([(PICTURE, 0)], classes="ab"), "PIL.Image.Image .*ToTensor")])
def test_what_the_models_cannot_take_is_said(dataset, said):
    with pytest.raises(UsageError, match=said):
        datasets.classes_and_shape(dataset)


def test_a_seed_follows_from_each_of_its_numbers_and_from_their_order():
    numbers = [(0,), (1,), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 10), (11, 0), (1, 1, 0), (1, 0, 1)]
    assert len({loading.seed(*each) for each in numbers}) == len(numbers)
    assert all(0 <= loading.seed(*each) < 2**63 for each in numbers)


def test_the_files_of_a_pair_may_spell_a_letter_with_an_accent_in_two_ways(tmp_path):
    """A Mac's zip file spells é with two characters."""
    names = ["train/img/caf\u00e9.png", "train/gt/cafe\u0301.jpg"]
    write_images(tmp_path, *names)
    assert pairs.find_pairs(tmp_path, "train", "img", "gt") == [tuple(str(tmp_path / name) for name in names)]


def test_a_preview_has_the_images_above_their_targets(tmp_path):
    pairs.save_preview(tmp_path / "a.png", torch.full((3, 3, 4, 4), -1.0), torch.full((3, 3, 4, 4), 1.0))
    with Image.open(tmp_path / "a.png") as image:
        rows = np.array(image)[[4, 10], 4::6, 0]  # tiles of 4 pixels, 2 between them
    assert rows.tolist() == [[0] * 3, [255] * 3]
