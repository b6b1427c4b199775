"""YOLOv3 against independent implementations: the authors' cfg, a loss written as loops, and boxes computed by hand."""
import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import box_iou, complete_box_iou_loss

from common import models
from common.errors import UsageError
from detection import yolov3

ANCHORS = torch.tensor([[8, 10], [12, 9], [14, 16], [20, 30], [30, 22], [32, 34], [50, 44], [48, 70], [80, 78.0]])


def conv(filters, size, stride=1, normalized=True):
    return "conv", filters, size, stride, normalized


def head(filters):
    """A head of the authors' yolov3.cfg; the route to the next scale begins four layers before its end."""
    return [conv(filters, 1), conv(2 * filters, 3)] * 3 + [conv(255, 1, normalized=False), ("yolo",), ("route", -4)]


CFG = [conv(32, 3)]
for stage, depth in enumerate((1, 2, 8, 8, 4)):
    CFG += [conv(64 << stage, 3, 2)] + [conv(32 << stage, 1), conv(64 << stage, 3), ("shortcut", -3)] * depth
CFG += head(512) + [conv(256, 1), ("upsample",), ("route", -1, 61)]
CFG += head(256) + [conv(128, 1), ("upsample",), ("route", -1, 36)] + head(128)[:-1]


def interpret(images, take):
    """Run CFG; `take(*shape)` returns its next numbers. Returns the three outputs, the one with stride 32 first."""
    outputs, found = [], []
    for kind, *values in CFG:
        x = outputs[-1] if outputs else images
        if kind == "conv":
            filters, size, stride, normalized = values
            shift = take(filters)
            scale, mean, variance = (take(filters) for _ in range(3)) if normalized else (1, 0, 1)
            weight = take(filters, x.shape[1], size, size)
            x = F.conv2d(x, weight, stride=stride, padding=size // 2)
            if normalized:
                x = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt() * scale[:, None, None]
            x = x + shift[:, None, None]
            x = torch.where(x > 0, x, x / 10) if normalized else x
        elif kind == "shortcut":
            x = x + outputs[values[0]]
        elif kind == "route":
            x = torch.cat([outputs[layer] for layer in values], 1)
        elif kind == "upsample":
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        else:
            found.append(x)
        outputs.append(x)
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file like yolov3.weights, with numbers that keep the signal's scale through all layers."""
    parts = [np.array([0, 2, 0, 32013312, 0], "<i4")]
    generator = torch.Generator().manual_seed(0)

    def take(*shape):
        drawn = torch.randn(shape, generator=generator)
        drawn = drawn / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else drawn.abs() * 0.2 + 0.8
        parts.append(drawn.numpy().ravel())
        return drawn

    interpret(torch.zeros(1, 3, 32, 32), take)
    path = tmp_path_factory.mktemp("darknet") / "yolov3.weights"
    path.write_bytes(b"".join(part.tobytes() for part in parts))
    return path


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_authors_file_gives_the_outputs_of_their_cfg(file, float64, tmp_path, capsys):
    """Saving the model writes the same bytes, except for the count of images."""
    assert file.stat().st_size == 248_007_048
    model = yolov3.create_model("yolov3", 80, ANCHORS).eval()
    yolov3.load_weights(model, str(file))
    assert capsys.readouterr().out == f"weights {file}: loaded all layers\n"
    assert model.anchors.tolist() == [
        [10, 13], [16, 30], [33, 23], [30, 61], [62, 45], [59, 119], [116, 90], [156, 198], [373, 326]]
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), open(file, "rb") as weights:
        weights.seek(20)
        wanted = interpret(images, lambda *shape: torch.from_numpy(
            np.fromfile(weights, "<f4", math.prod(shape))).view(shape).double())
        outputs, _ = model(images)
    for found, output in zip(reversed(outputs), wanted):
        output = output.view(1, 3, 85, *output.shape[2:]).permute(0, 3, 4, 1, 2)  # a mask's anchors one by one
        assert found.shape == output.shape
        assert output.std() > 0.1
        assert (found - output).abs().max() <= 1e-12 * output.abs().max()
    model.to(memory_format=torch.channels_last)  # as the scripts have it
    yolov3.save_weights(model, tmp_path / "copy.weights")
    assert (tmp_path / "copy.weights").read_bytes()[20:] == file.read_bytes()[20:]


def test_the_backbone_of_the_authors_fits_any_classes(file, tmp_path):
    path = tmp_path / "darknet53.conv.74"
    path.write_bytes(file.read_bytes()[:162_482_580])
    model = yolov3.create_model("yolov3", 3, ANCHORS)
    before = [parameter.clone() for parameter in model.heads.parameters()]
    yolov3.load_weights(model, str(path))
    assert all(torch.equal(*pair) for pair in zip(before, model.heads.parameters()))
    assert torch.equal(model.anchors, ANCHORS)
    last = model.backbone.stages[-1][-1][-1][0].weight
    assert np.array_equal(last.detach().numpy().ravel(), np.fromfile(path, "<f4")[-last.numel():])
    for size in 162_482_584, 162_482_576:
        os.truncate(path, size)
        _reject(model, path, size)
    _reject(model, file, 248_007_048)


def _reject(model, path, size):
    with pytest.raises(UsageError, match=rf"--weights {path}: {size:,} bytes; for 3 classes, the model has "
                                         r"246,\d+,\d+, its backbone 162,482,580$"):
        yolov3.load_weights(model, str(path))


def test_other_files_are_those_of_torch(tmp_path, capsys):
    model, copy = (yolov3.create_model("tiny", 2, ANCHORS) for _ in range(2))
    torch.save(model.state_dict(), tmp_path / "last.pt")
    yolov3.load_weights(copy, str(tmp_path / "last.pt"))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), copy.parameters()))
    with pytest.raises(UsageError, match="missing.weights: [Nn]o such file"):
        yolov3.load_weights(model, str(tmp_path / "missing.weights"))
    (tmp_path / "short.weights").write_bytes(b"\0" * 8)
    with pytest.raises(UsageError, match="short.weights: .*not from torch.save|short.weights: rejected"):
        yolov3.load_weights(model, str(tmp_path / "short.weights"))
    with pytest.raises(UsageError, match="no GroupNorm: use --model"):
        yolov3.save_weights(model, tmp_path / "tiny.weights")


def test_a_checkpoint_becomes_a_file_of_the_authors(tmp_path, monkeypatch, capsys):
    model = yolov3.create_model("tiny-bn", 2, ANCHORS)
    yolov3.save_weights(model, tmp_path / "wanted.weights")
    torch.save({"model": model.state_dict()}, tmp_path / "last.pt")
    monkeypatch.setattr("sys.argv", ["yolov3", str(tmp_path / "last.pt"), str(tmp_path / "found.weights")])
    yolov3.main()
    assert capsys.readouterr().out.startswith("anchors = 8.0,10.0, 12.0,9.0, ")
    assert (tmp_path / "found.weights").read_bytes() == (tmp_path / "wanted.weights").read_bytes()
    other = yolov3.create_model("tiny-bn", 2, 2 * ANCHORS)
    yolov3.load_weights(other, str(tmp_path / "found.weights"))
    assert torch.equal(other.anchors, ANCHORS)  # of the file beside it: those of this command's data would not fit
    with pytest.raises(UsageError, match="nowhere/file.weights: No such file"):
        yolov3.save_weights(model, tmp_path / "nowhere" / "file.weights")
    torch.save({"model": {}}, tmp_path / "last.pt")
    with pytest.raises(UsageError, match="last.pt: not a checkpoint of a detector"):
        yolov3.main()


# The loss, one place after the other ---------------------------------------------------------------------------------

def random_outputs(images, size, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(images, size // s, size // s, 3, 5 + classes, generator=generator)
                 for s in (8, 16, 32)), ANCHORS.to(torch.get_default_dtype())


def random_labels(images, size, classes, seed):
    """Return boxes of any size and some ignored regions, with no box in image 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for image in set(range(images)) - {1}:
        for _ in range(int(torch.randint(1, 7, (), generator=generator))):
            width, height = (4 + torch.rand(2, generator=generator) * (size - 8)).tolist()
            x, y = ((size - width) * float(torch.rand((), generator=generator)),
                    (size - height) * float(torch.rand((), generator=generator)))
            label = int(torch.randint(-2, classes, (), generator=generator))
            rows.append([image, label, x, y, x + width, y + height])
    return torch.tensor(rows)


@torch.no_grad()
def slow_loss(outputs, labels):
    """The definition in loops: returns the loss and, for each image, its positives (scale, row, column, anchor)."""
    maps, anchors = outputs
    total, positives = 0.0, [set() for _ in maps[0]]

    def box(image, scale, row, column, anchor):
        x, y, w, h = maps[scale][image, row, column, anchor, :4]
        stride, (width, height) = (8, 16, 32)[scale], anchors[3 * scale + anchor]
        x, y, w, h = (column + x.sigmoid()) * stride, (row + y.sigmoid()) * stride, width * w.exp(), height * h.exp()
        return torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2])

    def cross_entropy(x, target):
        return float(F.binary_cross_entropy_with_logits(x, target.to(x.dtype), reduction="sum"))

    for image, label, *true in labels:
        if label < 0:
            continue
        true, image = torch.stack(true), int(image)
        sizes = F.pad(anchors, (2, 0)), F.pad(true[2:] - true[:2], (2, 0))[None]
        best = int(box_iou(*sizes).argmax())
        scale, anchor, stride = best // 3, best % 3, (8, 16, 32)[best // 3]
        last = maps[scale].shape[1] - 1
        column, row = (min(int((true[axis] + true[axis + 2]) / 2 / stride), last) for axis in (0, 1))
        positives[image].add((scale, row, column, anchor))
        total += yolov3.BOX_WEIGHT * float(complete_box_iou_loss(box(image, scale, row, column, anchor), true))
        x = maps[scale][image, row, column, anchor, 5:]
        total += yolov3.CLASS_WEIGHT * cross_entropy(x, torch.arange(len(x)) == label)
    for image, own in enumerate(positives):
        boxes = labels[labels[:, 0] == image, 2:]
        for scale, part in enumerate(maps):
            for place in np.ndindex(*part.shape[1:4]):
                if (scale, *place) in own or (box_iou(box(image, scale, *place)[None], boxes) <= 0.5).all():
                    target = torch.tensor((scale, *place) in own)
                    total += yolov3.OBJECT_WEIGHT * cross_entropy(part[(image, *place, 4)], target)
    return total, positives


EDGES = torch.tensor([
    [0, 1, 2, 2, 12, 13], [0, 2, 3, 2, 12, 13.5],  # two boxes at one place
    [0, 0, 40, 0, 88, 64],                         # its center is on the right border of 64 pixels
    [2, 1, 60, 60, 68, 70], [2, 2, 64, 64, 64.5, 65],  # in the last corner, and beyond: one place
    [2, -1, 5, 5, 60, 60], [2, -3, 0, 0, 64, 64],  # regions to ignore
    [3, 0, -10, -10, 4, 4]])                       # its center is outside the image


@pytest.mark.parametrize("labels", [
    *(random_labels(4, 64, 3, seed) for seed in range(3)), EDGES, torch.zeros(0, 6)],
    ids=["random 0", "random 1", "random 2", "edges", "no boxes"])
def test_the_loss_is_its_definition_in_loops(float64, labels, monkeypatch):
    outputs, labels = random_outputs(4, 64, 3, 5), labels.double()
    wanted, positives = slow_loss(outputs, labels)
    if torch.equal(labels, EDGES.double()):
        assert list(map(len, positives)) == [2, 0, 1, 1]
    elif len(labels):
        assert not positives[1] and any(positives) and (labels[:, 1] < 0).any()
    whole = float(yolov3.loss(outputs, labels))
    assert whole == pytest.approx(wanted, rel=1e-12)
    monkeypatch.setattr(yolov3, "MOST_IOUS", 3 * 252)  # as if memory was short
    assert float(yolov3.loss(outputs, labels)) == whole


def test_the_gradient_reaches_boxes_and_classes_only_where_a_box_is(float64):
    (parts, anchors), labels = random_outputs(4, 64, 3, 5), EDGES.double()
    parts = tuple(part.requires_grad_() for part in parts)
    _, positives = slow_loss((parts, anchors), labels)
    yolov3.loss((parts, anchors), labels).backward()
    for scale, part in enumerate(parts):
        reached = (part.grad != 0).nonzero().tolist()
        own = {(image, *place) for image, places in enumerate(positives) for at, *place in places if at == scale}
        assert {tuple(place) for *place, channel in reached if channel != 4} == own
        assert sum(channel != 4 for *_, channel in reached) == 7 * len(own)


@pytest.mark.parametrize("name", ["tiny", "tiny-bn"])
def test_every_parameter_has_a_gradient_without_any_box(name):
    model = yolov3.create_model(name, 2, ANCHORS)
    loss = yolov3.loss(model(torch.rand(2, 3, 32, 32)), torch.zeros(0, 6))
    loss.backward()
    assert float(loss.detach()) > 0
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == ["anchors"]


def test_the_loss_of_half_precision_is_float32():
    parts, anchors = random_outputs(2, 32, 2, 1)
    labels = random_labels(1, 32, 2, 1)
    half = tuple(part.bfloat16() for part in parts)
    found = yolov3.loss((half, anchors), labels)
    assert found.dtype == torch.float32
    assert float(found) == float(yolov3.loss((tuple(part.float() for part in half), anchors), labels))


# Detections --------------------------------------------------------------------------------------------------------

def blank(images=2, size=64, classes=2):
    """Return outputs without any object."""
    maps = tuple(torch.zeros(images, size // s, size // s, 3, 5 + classes) for s in (8, 16, 32))
    for part in maps:
        part[..., 4:] = -20
    return maps, ANCHORS


def logit(p):
    return math.log(p / (1 - p))


def put(outputs, image, scale, row, column, anchor, objectness, label, shift=(0.0, 0.0, 0.0, 0.0)):
    own = outputs[0][scale][image, row, column, anchor]
    own[:4] = torch.tensor(shift)
    own[4], own[5 + label] = logit(objectness), 20


def test_detections_are_the_best_boxes_of_each_class_and_image():
    outputs = blank()
    put(outputs, 1, 0, 2, 5, 1, 0.9, 0)  # 12 x 9 at (44, 20)
    put(outputs, 1, 0, 2, 5, 2, 0.6, 0, (0, 0, math.log(12 / 14), math.log(10 / 16)))  # almost the same box: suppressed
    put(outputs, 1, 0, 2, 5, 0, 0.7, 1, (0, 0, math.log(12 / 8), math.log(9 / 10)))  # the same box, another class
    put(outputs, 0, 0, 2, 5, 1, 0.5, 0)  # the same box in another image
    put(outputs, 0, 2, 1, 0, 2, 0.8, 1, (logit(0.25), logit(0.75), 0, 0))  # 80 x 78 at (8, 56): beyond the image
    put(outputs, 0, 1, 0, 0, 0, 0.008, 1)  # unlikely
    box = [38, 15.5, 50, 24.5]
    wanted = torch.tensor([[0, 0, 17, 48, 64, 0.8, 1], [0, *box, 0.5, 0], [1, *box, 0.9, 0], [1, *box, 0.7, 1]])
    torch.testing.assert_close(yolov3.detect(outputs), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(yolov3.detect(outputs, most=1), wanted[[0, 2]], rtol=0, atol=1e-4)
    torch.testing.assert_close(yolov3.detect(outputs, threshold=0.75), wanted[[0, 2]], rtol=0, atol=1e-4)
    assert yolov3.detect(blank()).shape == (0, 7)


def test_the_detections_of_an_image_do_not_depend_on_its_batch():
    """The test includes equal scores, and more places than suppression considers."""
    maps, anchors = random_outputs(12, 160, 8, 3)
    maps = tuple((part * 4).round() / 4 for part in maps)
    found = yolov3.detect((maps, anchors), threshold=0.001)
    assert found[:, 0].long().bincount().tolist() == [100] * 12
    assert len(found[:, 5].unique()) < len(found)  # ties
    for image in range(12):
        alone = yolov3.detect((tuple(part[image:image + 1] for part in maps), anchors), threshold=0.001)
        assert torch.equal(alone[:, 1:], found[found[:, 0] == image][:, 1:])


def test_suppression_does_not_round_the_boxes_of_late_images():
    """batched_nms adds offsets, here up to 316,000 pixels, where float32 has steps of 0.03. The IoU limit is 0.45."""
    outputs = blank(120, 32, 80)
    for image in range(120):
        overlap = 0.45 + (image - 59.5) * 1e-5
        apart = 12 * (1 - overlap) / (1 + overlap) / 8  # of two boxes 12 x 9, in cells
        put(outputs, image, 0, 1, 1, 1, 0.9, 79, (logit(0.1), 0, 0, 0))
        put(outputs, image, 0, 1, 1, 0, 0.8, 79, (logit(0.1 + apart), 0, math.log(12 / 8), math.log(9 / 10)))
    assert yolov3.detect(outputs)[:, 0].long().bincount().tolist() == [2] * 60 + [1] * 60


# Freezing and the schedule -------------------------------------------------------------------------------------------

def test_a_frozen_backbone_does_not_change():
    model = yolov3.create_model("tiny-bn", 2, ANCHORS)
    models.freeze_layers(model)
    model.train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(models.parameter_groups(model, 0.1), 0.1)
    yolov3.loss(model(torch.rand(4, 3, 32, 32)), torch.tensor([[0, 1, 2, 2, 20, 30.0]])).backward()
    optimizer.step()
    changed = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed == {key for key in before if key.startswith("heads.")}


@pytest.mark.parametrize(("name", "warmup", "wanted"), [
    ("step", 0, [1] * 8 + [0.1, 0.01, 0.01]), ("step", 3, [0.25, 0.5, 0.75] + [1] * 5 + [0.1, 0.01, 0.01]),
    ("cosine", 0, [0.01 + 0.99 * (1 + math.cos(math.pi * n / 10)) / 2 for n in range(11)]),
    ("cosine", 1, [0.5] + [0.01 + 0.99 * (1 + math.cos(math.pi * n / 10)) / 2 for n in range(1, 11)])])
def test_the_rate_rises_and_falls(name, warmup, wanted):
    assert [yolov3.schedule(name, 10, 0.01, warmup)(n) for n in range(11)] == pytest.approx(wanted)
