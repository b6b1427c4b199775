"""The networks and the schedule, against what their papers say."""
import pytest
import torch

from common import models


@pytest.mark.parametrize(("size", "left"), [(28, 4), (32, 4), (64, 8), (65, 3), (224, 7)])
def test_a_resnet_leaves_small_images_more_than_a_pixel(size, left):
    """Of images up to 64 pixels an eighth, as for CIFAR in He et al. 2015; of larger ones a thirty-second."""
    model = models.create_model("resnet18", 10, (1, size, size)).eval()
    shapes = []
    model.layer4.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    with torch.inference_mode():
        assert model(torch.zeros(1, 1, size, size)).shape == (1, 10)
    assert shapes == [(1, 512, left, left)]


@pytest.mark.parametrize("lrf", [0.0, 0.01, 1.0])
def test_the_rate_falls_along_half_a_cosine_to_its_last_fraction(lrf):
    factor = models.cosine(10, lrf)
    assert [factor(n) for n in (0, 5, 10)] == pytest.approx([1, (1 + lrf) / 2, lrf])
    assert factor(2) == pytest.approx(lrf + (1 - lrf) * 0.9045085)  # (1 + cos 36 degrees) / 2
    assert factor(11) == factor(10)  # a run that is resumed past its end
