"""The order of the samples and their augmentation, without a launch; test_order.py has real processes and workers."""


def test_the_baselines_sampler_has_the_distributed_samplers_order():
    import torch
    from torch.utils.data import DistributedSampler, RandomSampler

    data = list(range(101))
    plain = RandomSampler(data, generator=torch.Generator())
    dealt = [DistributedSampler(data, 2, rank, seed=5, drop_last=True) for rank in (0, 1)]
    for epoch in (1, 2, 3):
        plain.generator.manual_seed(5 + epoch)
        for sampler in dealt:
            sampler.set_epoch(epoch)
        assert list(plain)[:100] == [index for pair in zip(*dealt, strict=True) for index in pair]


def test_each_sample_has_crops_and_flips_of_its_own():
    """All 81 offsets and both flips occur, none much more often than another; a pixel that marks the corner tells."""
    import torch

    from common.datasets import ArrayDataset

    count = 8100
    images = torch.zeros(count, 3, 32, 32, dtype=torch.uint8)
    images[:, :, 10, 12] = 255  # after a crop at (top, left) it is at (14 - top, 16 - left), or mirrored
    data = ArrayDataset("cifar10", images, torch.zeros(count, dtype=torch.int64), 0, augment=True)
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
