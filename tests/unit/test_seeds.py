"""Two seeds never share the order of an epoch, so runs with different seeds are independent."""
import sys
from argparse import Namespace

from common import datasets


def test_two_seeds_share_no_order(tmp_path, monkeypatch):
    """One step in each epoch, so that its batch is the epoch's order; a seed apart, and an epoch apart.

    Of train.py: the other scripts train its model, so they have its order.
    """
    import train

    large, small = datasets.digits()
    monkeypatch.setattr(datasets, "digits", lambda: [[part[:36] for part in large], [part[:4] for part in small]])
    read, orders = datasets.ArrayDataset.__getitems__, []

    def note(dataset, indices):
        if len(dataset) == 36:
            orders.append(tuple(indices))
        return read(dataset, indices)

    monkeypatch.setattr(datasets.ArrayDataset, "__getitems__", note)
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cpu", "--batch-size", "36", "--epochs", "3", "--workers",
                                      "0", "--output-dir", str(tmp_path)])
    args = train.parse_args()
    for args.seed in (0, 1):
        train.main(args)
    assert len(orders) == len(set(orders)) == 6


def test_the_loaders_seeds_share_no_order(photos, tmp_path, monkeypatch):
    import loader

    for name in ("img", "gt"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for path in photos.glob("*/*.jpg"):
            (tmp_path / "train" / name / f"{path.parent.name}-{path.name}").symlink_to(path)
    args = {"data_source": tmp_path, "split": "train", "img_dir": "img", "gt_dir": "gt", "resize": 0, "crop": 32,
            "batch_size": 4, "workers": 0, "device": "cpu"}
    found = []
    for seed in range(5):
        sampler = loader.build_loader(Namespace(**args, seed=seed)).sampler
        for epoch in range(1, 11):
            sampler.set_epoch(epoch)
            found.append(tuple(sampler))
    assert len(found) == len(set(found)) == 50
