"""The networks, and how to prepare one for training: load weights, freeze layers, group parameters."""
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import load_file, other_classes
from .errors import UsageError
from .reduce import is_main_process

# What wrappers add to names: DDP and AveragedModel, torch.compile, FSDP1, and activation checkpointing
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
MODELS = ["cnn", "vit", "vit_base", "resnet18", "resnet34", "resnet50"]


class CNN(nn.Module):
    """Three 5x5 convolutions with max-pooling, then three linear layers: (N, C, H, W) to logits (N, num_classes)."""

    def __init__(self, num_classes: int, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.features = nn.Sequential(  # ReLU after max-pooling: the same values with a quarter of the work
            nn.Conv2d(channels, 16, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(16, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(32, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
        self.hidden = nn.Sequential(
            nn.Linear(32 * (height // 8) * (width // 8), 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        for module in self.modules():  # keeps the signal's scale without BatchNorm (He et al. 2015, arXiv:1502.01852)
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.hidden(self.features(images)))


def create_model(name: str, classes: int | list[str], image_shape: tuple[int, ...]) -> nn.Module:
    """Return the network `name` (one of MODELS) for images of `image_shape` (C, H, W), freshly initialized.

    `classes` is their number, or their names, which the model's checkpoints then contain. The ResNets are
    torchvision's. For images of at most 64 pixels, the stem is a 3x3 convolution with stride 1 and no max-pool, as for
    CIFAR in He et al. 2015, arXiv:1512.03385, section 4.2: else, the last stage would see 32x32 pixels as one.
    """
    num_classes, (channels, height, _) = classes if isinstance(classes, int) else len(classes), image_shape
    if name == "cnn":
        model: Any = CNN(num_classes, image_shape)
    elif name.startswith("vit"):
        from .vit import ViT

        model = ViT(name, num_classes, image_shape)
    else:
        from torchvision.models import resnet  # not at the top: importing torchvision takes half a second

        model = getattr(resnet, name)(num_classes=num_classes)
        if height <= 64:
            model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
            model.maxpool = nn.Identity()
        elif channels != 3:
            model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    model.classes = classes
    return model


def load_weights(model: nn.Module, path: str, content: dict | None = None) -> None:
    """Load the tensors in `path` that match `model` by name and shape; the main process lists all other tensors.

    The file is a `state_dict`, or a checkpoint that has one under any key; for other formats, the caller passes its
    `content`. Names may contain WRAPPERS, or start with one more component. Raises UsageError if nothing matches.
    """
    content = load_file("--weights", path) if content is None else content
    other, wanted = other_classes(content, model), model.state_dict()
    content = max(_readings(content, wanted), key=lambda names: len(names.keys() & wanted.keys()))
    if (longer := [old for name, (old, _) in content.items() if name != old]) and is_main_process():
        print(f"weights {path}: removed wrappers from {len(longer)} names, such as {min(longer)}")
    taken = {name: tensor for name, (_, tensor) in content.items() if name in wanted and isinstance(tensor, Tensor)
             and (tensor.shape, tensor.is_floating_point()) == (wanted[name].shape, wanted[name].is_floating_point())}
    if not taken:
        raise UsageError(f"--weights {path}: no tensor in it matches the model by name, shape and type")
    model.load_state_dict({name: taken[name] for name in taken if not wanted[name].is_meta}, strict=False)
    model.load_state_dict({name: tensor.to(wanted[name].dtype).contiguous() for name, tensor in taken.items()
                           if wanted[name].is_meta}, strict=False, assign=True)
    if is_main_process():
        left = {"not in the file": wanted.keys() - content.keys(), "not in the model": content.keys() - wanted.keys(),
                "of a different shape or type": wanted.keys() & content.keys() - taken.keys()}
        rest = "".join(f"; {why}: {', '.join(sorted(map(str, names)))}" for why, names in left.items() if names)
        print(f"weights {path}: loaded {len(taken)} of {len(wanted)} tensors{rest}{other and f'; {other}'}")


def _readings(content: dict, wanted: dict) -> Iterator[dict[str, tuple[str, Any]]]:
    """Yield each way to read a file as {name: (name in the file, tensor)}: without WRAPPERS, then without a prefix."""
    for part in (content.get("model"), content.get("state_dict"), content, *content.values()):
        named = {str(name): (str(name), part[name]) for name in part} if isinstance(part, dict) else {}
        plain = {".".join(word for word in name.split(".") if word not in WRAPPERS): named[name] for name in named}
        for prefix in dict.fromkeys(["", *(name.partition(".")[0] + "." for name in plain)]):
            yield {name.removeprefix(prefix): plain[name] for name in plain} | {
                name: named[name] for name in named.keys() & wanted.keys()}


def sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with SyncBatchNorm, which normalizes over all processes' samples, in place of each BatchNorm."""
    if device.type == "cpu":
        raise UsageError("--sync-bn: SyncBatchNorm needs a GPU, and this run is on the cpu")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def to_device(model: nn.Module, device: torch.device) -> None:
    """Move a model to `device`, with the weights of its convolutions in channels-last, the fastest layout for them."""
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if device.type == "cuda":  # on a CPU, this would be slower
        fit_gradients(model)


def fit_gradients(model: nn.Module) -> None:
    """Make weights for one input channel contiguous, as cuDNN's gradients are: otherwise, DDP would copy them."""
    for weight in model.parameters():
        if weight.ndim == 4 and weight.shape[1] == 1:
            weight.data = weight.data.clone(memory_format=torch.contiguous_format)


def freeze_layers(model: nn.Module) -> None:
    """Freeze `model.backbone` or, without one, all layers except the classifier, which is the last linear layer."""
    frozen = getattr(model, "backbone", model)
    frozen.requires_grad_(False)
    if frozen is model:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise UsageError("--freeze-layers: the model has no `backbone` and no linear layer as its classifier")
        linear[-1].requires_grad_(True)
    for module in frozen.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # model.train() would let its statistics drift
            module.eval()
            module.train = types.MethodType(_stay, module)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return the trainable parameters in two groups for an optimizer: biases and norms get no weight decay."""
    # norms: Goyal et al. 2017, arXiv:1706.02677, section 5.1; biases: He et al. 2018, arXiv:1812.01187
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [{"params": [parameter for parameter in trainable if parameter.ndim > 1], "weight_decay": weight_decay},
            {"params": [parameter for parameter in trainable if parameter.ndim <= 1], "weight_decay": 0.0}]


def size(model: nn.Module) -> str:
    """Return the numbers of trainable parameters and of all parameters as text: "5,130 of 11,181,642"."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return f"{sum(size for size, trainable in sizes if trainable):,} of {sum(size for size, _ in sizes):,}"
