"""The networks and the schedule, compared with their papers; and accuracy."""
import pytest
import torch

from common import models, recipe
from common.errors import UsageError


@pytest.mark.parametrize(("size", "left"), [(28, 4), (32, 4), (64, 8), (65, 3), (224, 7)])
def test_a_resnet_leaves_small_images_more_than_a_pixel(size, left):
    """Images of at most 64 pixels shrink to an eighth, as for CIFAR in He et al. 2015; larger ones to 1/32."""
    model = models.create_model("resnet18", 10, (1, size, size)).eval()
    shapes = []
    model.layer4.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    with torch.inference_mode():
        assert model(torch.zeros(1, 1, size, size)).shape == (1, 10)
    assert shapes == [(1, 512, left, left)]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [64, 65])
def test_a_resnet_takes_any_number_of_channels(channels, size):
    with torch.device("meta"):
        assert models.create_model("resnet18", 10, (channels, size, size)).conv1.in_channels == channels


@pytest.mark.parametrize("lrf", [0.0, 0.01, 1.0])
def test_the_rate_falls_along_half_a_cosine_to_its_last_fraction(lrf):
    factor = recipe.cosine(10, lrf)
    assert [factor(n) for n in (0, 5, 10)] == pytest.approx([1, (1 + lrf) / 2, lrf])
    assert factor(2) == pytest.approx(lrf + (1 - lrf) * 0.9045085)  # (1 + cos 36 degrees) / 2
    assert factor(11) == factor(10)  # a run that is resumed past its end


def test_a_hit_is_a_label_among_the_highest():
    outputs, targets = torch.tensor([[3.0, 2.0, 1.0]] * 3), torch.tensor([0, 1, 2])
    assert recipe.top(1)(outputs, targets).tolist() == [True, False, False]
    assert recipe.top(2)(outputs, targets).tolist() == [True, True, False]
    assert recipe.top(5)(outputs, targets).all()  # of three classes


@pytest.mark.parametrize(("outputs", "targets"), [
    (torch.zeros(4, 1), torch.zeros(4, 1)), (torch.zeros(4, 3), torch.zeros(4)), (torch.zeros(4), torch.arange(4)),
    (torch.zeros(4, 3, 8, 8), torch.zeros(4, 8, 8, dtype=torch.int64))])
def test_there_is_no_accuracy_of_a_regression(outputs, targets):
    """Broadcasting would return a meaningless number."""
    with pytest.raises(UsageError, match="accuracy needs .*# yours: the metrics"):
        recipe.top(1)(outputs, targets)


def test_the_headline_counts_what_is_trained():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1000))
    models.freeze_layers(model)
    assert models.size(model) == "4,000 of 4,009"


def test_a_model_without_a_classifier_cannot_be_frozen():
    with pytest.raises(UsageError, match="--freeze-layers: .*no linear layer"):
        models.freeze_layers(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", models.MODELS)
def test_convolutions_are_in_channels_last_and_fit_the_gradients_of_cudnn(name, channels):
    model = models.create_model(name, 10, (channels, 28, 28))
    models.to_device(model, torch.device("cpu"))
    weights = [weight for weight in model.parameters() if weight.ndim == 4]
    assert weights and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    models.fit_gradients(model)
    for weight in weights:
        layout = torch.channels_last if weight.shape[1] > 1 else torch.contiguous_format
        assert weight.stride() == torch.empty(weight.shape, memory_format=layout).stride()


@pytest.mark.parametrize(("metric", "said"), [
    (lambda outputs, targets: outputs.mean(), r"'mine' returned shape \(\) for 3 samples"),
    (lambda outputs, targets: 0.5, "'mine' returned float for 3 samples")])
def test_a_metric_of_another_size_is_named(metric, said):
    outputs, targets = torch.ones(3, 2), torch.zeros(3)
    assert recipe.sum_metrics({"mine": lambda outputs, targets: outputs[:, :1]}, outputs, targets) == [3.0]
    with pytest.raises(UsageError, match=said):
        recipe.sum_metrics({"mine": metric}, outputs, targets)


@pytest.mark.parametrize(("wrap", "count", "example"), [
    (lambda name: f"_orig_mod.{name}", 12, "_orig_mod.classifier.bias"),
    (lambda name: f"module.{name}", 12, "module.classifier.bias"),
    (lambda name: f"_orig_mod.module.{name}", 12, "_orig_mod.module.classifier.bias"),
    (lambda name: f"model.{name}", 12, "model.classifier.bias"),
    (lambda name: f"net.module.{name}", 12, "net.module.classifier.bias"),
    (lambda name: name.replace("features.", "features._orig_mod."), 6, "features._orig_mod.0.bias")])
def test_weights_are_loaded_under_the_names_of_wrappers(tmp_path, capsys, wrap, count, example):
    """Those of DDP and torch.compile, for the whole model or a part of it, and the attribute of a LightningModule."""
    saved, model = (models.create_model("cnn", 10, (1, 28, 28)) for _ in range(2))
    torch.save({wrap(name): tensor for name, tensor in saved.state_dict().items()}, tmp_path / "some.pt")
    models.load_weights(model, str(tmp_path / "some.pt"))
    assert all(map(torch.equal, saved.state_dict().values(), model.state_dict().values()))
    assert capsys.readouterr().out.splitlines() == [
        f"weights {tmp_path / 'some.pt'}: removed wrappers from {count} names, such as {example}",
        f"weights {tmp_path / 'some.pt'}: loaded 12 of 12 tensors"]


def test_a_models_own_module_keeps_its_name(tmp_path, capsys):
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
    torch.save({"module.weight": torch.ones(2, 2), "weight": torch.zeros(2, 2)}, tmp_path / "some.pt")
    models.load_weights(model, str(tmp_path / "some.pt"))
    assert model["module"].weight.all() and "removed" not in capsys.readouterr().out


def test_a_plain_name_wins_over_a_wrapped_one(tmp_path):
    """Such as a checkpoint with the weights and their average."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.save({"weight": torch.ones(2, 2), "module.weight": torch.zeros(2, 2)}, tmp_path / "some.pt")
    models.load_weights(model, str(tmp_path / "some.pt"))
    assert model.weight.all()


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "net"])
def test_weights_are_found_in_checkpoints_of_other_programs(tmp_path, capsys, key):
    """In the dict that fits best; of several, the first is taken, and "model" before an average."""
    saved, model = (models.create_model("cnn", 10, (1, 28, 28)) for _ in range(2))
    average = {name: tensor + 1 for name, tensor in saved.state_dict().items()}
    first = {"ema": average} if key == "model" else {}
    torch.save({**first, key: saved.state_dict() | {0: 1}, "epoch": 3, "ema2": average}, tmp_path / "some.pt")
    models.load_weights(model, str(tmp_path / "some.pt"))
    assert all(map(torch.equal, saved.state_dict().values(), model.state_dict().values()))
    assert "loaded 12 of 12 tensors; not in the model: 0" in capsys.readouterr().out


@pytest.mark.parametrize("change", [
    lambda tensor: (tensor * 100).to(torch.int8), lambda tensor: tensor.to(torch.complex64)])
def test_weights_of_another_kind_of_type_are_not_loaded(tmp_path, change):
    """Quantized weights need their scales."""
    model = torch.nn.Linear(2, 2)
    torch.save({name: change(tensor) for name, tensor in model.state_dict().items()}, tmp_path / "some.pt")
    with pytest.raises(UsageError, match="no tensor in it matches the model by name, shape and type$"):
        models.load_weights(model, str(tmp_path / "some.pt"))
