"""Two seeds share no epoch's order of samples: a spread over seeds is one over independent runs."""
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import PYTHON, copy_out, good, run

NOTE = '''
        if self.augment is None:
            print("order", int(self.epoch), *indices)
        indices = torch.as_tensor(indices)
'''
SCRIPTS = ["train.py", pytest.param("train_DDP.py", marks=pytest.mark.drill)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_seeds_share_no_order(tmp_path, script):
    """A step for each epoch, so that its one batch is the epoch's order; a seed apart, and an epoch apart."""
    path = copy_out(script, tmp_path / "noted")
    data = path.parent / "common/datasets.py"
    text = data.read_text()
    noted = text.replace("\n        indices = torch.as_tensor(indices)\n", NOTE, 1).replace(
        "return ArrayDataset(name, *train, seed, augment=name in COLOR)",
        "return ArrayDataset(name, *train, seed, augment=None)", 1)
    assert noted.count("order") == text.count("order") + 1 and "augment=None)" in noted
    data.write_text(noted)

    def orders(seed):
        said = good(run(PYTHON, path, "--batch-size", "1438", "--epochs", "3", "--workers", "0", "--seed", seed,
                        "--output-dir", tmp_path / str(seed), cwd=path.parent)).out
        return [line.split(maxsplit=2)[2] for line in said.splitlines() if line.startswith("order")]

    with ThreadPoolExecutor(2) as pool:
        found = [order for each in pool.map(orders, (0, 1)) for order in each]
    assert len(found) == len(set(found)) == 6


def test_the_loaders_seeds_share_no_order(photos, tmp_path, monkeypatch):
    import loader

    for name in ("img", "gt"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for path in (photos / "ash").glob("*.jpg"):
            (tmp_path / "train" / name / path.name).symlink_to(path)
    args = {"data_source": tmp_path, "split": "train", "img_dir": "img", "gt_dir": "gt", "resize": 0, "crop": 32,
            "batch_size": 4, "workers": 0, "device": "cpu"}
    found = []
    for seed in range(5):
        sampler = loader.build_loader(Namespace(**args, seed=seed)).sampler
        for epoch in range(1, 11):
            sampler.set_epoch(epoch)
            found.append(tuple(sampler))
    assert len(found) == len(set(found)) == 50
