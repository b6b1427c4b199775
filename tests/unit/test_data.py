"""The data: how a set is split, augmented and normalised, and what the sets of pairs write."""
import numpy as np
import torch
from PIL import Image

from common import datasets, pairs


def test_a_fifth_of_each_class_is_kept_for_validation():
    labels = np.repeat([0, 1, 2], [10, 100, 40])
    np.random.RandomState(1).shuffle(labels)
    train, val = datasets._stratified_split(labels)
    assert sorted([*train, *val]) == list(range(150))
    assert np.bincount(labels[val]).tolist() == [2, 20, 8]


def test_what_a_crop_has_beyond_the_image_is_black():
    images = torch.full((300, 3, 32, 32), 200, dtype=torch.uint8)
    data = datasets.ArrayDataset("cifar10", images, torch.zeros(300, dtype=torch.int64), 0, augment=True)
    batch, _ = data.__getitems__(range(300))
    assert batch.unique().tolist() == [0, 200]
    assert (batch[:, :, 4:-4, 4:-4] == 200).all()  # 4 pixels at most


def test_two_files_of_one_picture_are_cropped_differently_and_an_epoch_repeats_it(tmp_path):
    picture = np.random.RandomState(0).randint(0, 256, (60, 60, 3)).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "0.png")
    data = datasets.FolderDataset([(str(tmp_path / "0.png"), 0)] * 4, 1, 0, augment=True)
    views = {}
    for epoch in (1, 2, 1):
        data.set_epoch(epoch)
        images, _ = data.__getitems__(range(4))
        assert torch.equal(images, views.setdefault(epoch, images))
    assert len(torch.cat([*views.values()]).flatten(1).unique(dim=0)) == 8


def test_normalised_pixels_have_mean_0_and_standard_deviation_1():
    train, _ = datasets.create_datasets("digits", "", 0, "")
    pixels = datasets.Normalize(train)(train.images)
    assert pixels.dtype == torch.float32 and abs(pixels.mean()) < 1e-3 and abs(pixels.std() - 1) < 1e-3


def test_a_seed_follows_from_each_of_its_numbers_and_from_their_order():
    numbers = [(0,), (1,), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 10), (11, 0), (1, 1, 0), (1, 0, 1)]
    assert len({datasets.mix(*each) for each in numbers}) == len(numbers)
    assert all(0 <= datasets.mix(*each) < 2**63 for each in numbers)


def test_a_preview_has_the_images_above_their_targets(tmp_path):
    pairs.save_preview(tmp_path / "a.png", torch.full((3, 3, 4, 4), -1.0), torch.full((3, 3, 4, 4), 1.0))
    with Image.open(tmp_path / "a.png") as image:
        rows = np.array(image)[[4, 10], 4::6, 0]  # tiles of 4 pixels, 2 between them
    assert rows.tolist() == [[0] * 3, [255] * 3]


def test_samples_are_made_in_one_thread_and_the_others_come_back(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pairs.make_samples(tmp_path / "pairs")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
