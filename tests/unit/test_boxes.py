"""Detection: datasets, mistakes in their files, anchors, sizes, pictures, and average precision as in pycocotools."""
import json
from unicodedata import normalize

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Subset
from torchvision.ops import box_iou

from common import loading
from common.errors import ProcessError, UsageError
from detection import data, mean_ap

SCENES, VAL_SCENES = data.create_datasets("scenes", "", 96, 0)


def batches(dataset, batch_size, workers):
    options = loading.options(workers, torch.device("cpu"), dataset)
    images, labels = zip(*DataLoader(Subset(dataset, range(20)), batch_size, **options))
    return torch.cat(images), torch.cat([part[:, 1:] for part in labels])


def equal(samples, others):
    return all(map(torch.equal, samples, others))


def test_a_scene_follows_from_seed_epoch_and_index():
    first = SCENES.__getitems__(range(20))
    assert first[0].shape == (20, 3, 96, 96) and first[0].dtype == torch.uint8 and first[1].dtype == torch.float32
    assert len(SCENES) == 1024 and first[1][:, 0].unique().tolist() == [*range(20)]
    for batch_size, workers in (20, 0), (3, 0), (7, 2):
        assert equal(batches(SCENES, batch_size, workers), (first[0], first[1][:, 1:]))
    image, labels = SCENES[7]
    assert torch.equal(image, first[0][7]) and torch.equal(labels[:, 1:], first[1][first[1][:, 0] == 7, 1:])
    others = [data.create_datasets("scenes", "", 96, seed)[0] for seed in (0, 1)]
    others[0].set_epoch(1)
    for other in others:
        assert not any(map(torch.equal, other.__getitems__(range(20))[0], first[0]))


def test_validation_has_the_same_scenes_of_other_digits_whatever_the_seed():
    other = data.create_datasets("scenes", "", 96, 1)[1]
    other.set_epoch(3)
    assert len(other) == 256 and equal(other.__getitems__(range(20)), VAL_SCENES.__getitems__(range(20)))
    seen = [{(digit.shape, digit.numpy().tobytes()) for _, digit in part.digits} for part in (SCENES, VAL_SCENES)]
    assert len(seen[1]) == 359 and not seen[0] & seen[1]


def test_the_ink_of_a_digit_touches_each_side_of_its_box():
    images, labels = SCENES.__getitems__(range(300))
    ink = images.amax(1) > 31  # the noise is darker
    for place, _, x1, y1, x2, y2 in labels.int().tolist():
        inside = ink[place, y1:y2, x1:x2]
        assert all(side.any() for side in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
        ink[place, y1:y2, x1:x2] = False if (labels[:, 0] == place).sum() == 1 else ink[place, y1:y2, x1:x2]
    alone = labels[:, 0].int().bincount() == 1
    assert alone.sum() > 20 and not ink[alone].any()


def write_image(path, boxes=((20, 30, 60, 50),), size=(100, 80)):
    """Write a dark image with white pixels in each box."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    for x1, y1, x2, y2 in boxes:
        pixels[y1:y2, x1:x2] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def xml(*objects, file="a b.png"):
    return f"<annotation><filename>{file}</filename>{''.join(objects)}</annotation>"


def voc_object(name, *box, more=""):
    sides = "".join(f"<{side}>{at}</{side}>" for side, at in zip(("xmin", "ymin", "xmax", "ymax"), box))
    return f"<object><name>{name}</name>{more}<bndbox>{sides}</bndbox></object>"


def coco(*annotations, images=("a b.png", "empty.png")):
    return {"images": [{"id": 7 + n, "file_name": name} for n, name in enumerate(images)],
            "categories": [{"id": 5, "name": "dog"}, {"id": 3, "name": "cat"}], "annotations": [*annotations]}


def annotation(number, label, *bbox, image=7, **more):
    return {"id": number, "image_id": image, "category_id": label, "bbox": [*bbox], **more}


JSON, XML = "annotations/instances_train2017.json", "Annotations/a.xml"
BOX = voc_object("dog", 21, 31, 60, 50)
FILES = {  # of each set: an image with a box of class 1 and a region to ignore of class 0, and one without
    "lines": {"classes.txt": "cat\ndog\n", "train.txt": "a b.png 20,30,60,50,1\n\nempty.png\n",
              "val.txt": "a b.png   20,30,60,50,1 100,5,300,20,0\n"},  # the second is outside the image
    "coco": {"annotations/instances_train2017.json": json.dumps(coco(
                 annotation(1, 5, 20, 30, 40, 20), annotation(2, 3, -5, 60, 15.5, 30, iscrowd=1),
                 annotation(3, 3, 5, 5, 0, 9))),
             "annotations/instances_val2017.json": json.dumps(coco(annotation(1, 5, 20, 30, 40, 20, iscrowd=0)))},
    "voc": {"ImageSets/Main/train.txt": "a\n\nempty 1\n", "ImageSets/Main/val.txt": "a\n",
            "Annotations/a.xml": xml(BOX, voc_object("cat", -4, 61, 10.5, 90, more="<difficult>1</difficult>")),
            "Annotations/empty.xml": xml(file="empty.png")}}
IMAGES = {"lines": [""], "coco": ["train2017/", "val2017/"], "voc": ["JPEGImages/"]}


def write_set(folder, name, **changes):
    """Write a valid set of files with these changes; a file that is None is missing."""
    for path, text in {**FILES[name], **changes}.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    for place in IMAGES[name]:
        write_image(folder / f"{place}a b.png")
        write_image(folder / f"{place}empty.png", [])
    return folder


@pytest.mark.parametrize("name", FILES)
def test_files_of_each_kind_are_read(tmp_path, name):
    train, val = data.create_datasets(name, write_set(tmp_path, name), 96, 0)
    val.image_size = 100  # the files' width, so that no number is rounded
    assert (len(train), len(val)) == (2, 2 if name == "coco" else 1)
    assert train.num_classes == 2 and train.classes == val.classes == ["cat", "dog"]
    assert train.samples[0][1].tolist()[0] == [1, 20, 30, 60, 50] and train.samples[1][1].shape == (0, 5)
    if name != "lines":
        assert train.samples[0][1].tolist()[1:] == [[-1, -5, 60, 10.5, 90]]
    images, labels = val.__getitems__([0] * 2)
    assert images.shape == (2, 3, 100, 100) and images.dtype == torch.uint8
    assert labels[labels[:, 1] == 1].tolist() == [[0, 1, 20, 40, 60, 60], [1, 1, 20, 40, 60, 60]]  # 10 gray rows above
    assert len(labels) == (4 if name == "voc" else 2)
    if name == "voc":
        assert labels[labels[:, 1] < 0, 2:].tolist() == [[0, 70, 10.5, 90]] * 2  # clipped to the image
    assert train.__getitems__([1])[1].shape == (0, 6)


def test_classes_are_those_of_the_training_part_or_of_the_file(tmp_path):
    lines = write_set(tmp_path / "lines", "lines", **{"classes.txt": None, "train.txt": "a b.png 1,2,3,4,1 1,2,3,4,0"})
    assert data.create_datasets("lines", lines, 96, 0)[0].classes == ["0", "1"]
    few = write_set(tmp_path / "few", "lines", **{  # the validation images have no box of class 1
        "classes.txt": None, "train.txt": "a b.png 1,2,3,4,1 1,2,3,4,0 1,2,3,4,2", "val.txt": "a b.png 1,2,3,4,2"})
    assert data.create_datasets("lines", few, 96, 0)[1].samples[0][1][0, 0] == 2
    voc = write_set(tmp_path / "voc", "voc", **{"classes.txt": "dog\nant\ncat\n"})
    train, _ = data.create_datasets("voc", voc, 96, 0)
    assert train.classes == ["dog", "ant", "cat"] and train.samples[0][1][:, 0].tolist() == [0, -3]


def write_declared(folder, name, size, box=(20, 30, 60, 50)):
    """Write a set whose training image of 100 x 80 pixels has this declared size and this box; return the image."""
    if name == "voc":
        sides = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
        write_set(folder, "voc", **{XML: xml(sides, voc_object("dog", *box), voc_object("cat", 1, 1, 9, 9))})
    else:
        content = coco(annotation(1, 5, *box[:2], box[2] - box[0], box[3] - box[1]), images=["a b.png"])
        content["images"][0] |= {"width": size[0], "height": size[1]}
        write_set(folder, "coco", **{JSON: json.dumps(content)})
    return data.create_datasets(name, folder, 96, 0)[0]


@pytest.mark.parametrize("name", ["coco", "voc"])
def test_boxes_for_another_size_are_refused(tmp_path, capsys, name):
    """The image was resized, or turned. A wrong size is harmless if the boxes do not fit it; so is one of 0."""
    for number, size in enumerate([(200, 160), (80, 100), (100, 82), (64, 51)]):
        train = write_declared(tmp_path / str(number), name, size)
        with pytest.raises(ProcessError, match=f"a b.png: 100x80 pixels, but its boxes are for {size[0]}x{size[1]}; "):
            train[0]
    for number, size in enumerate([(100, 80), (101, 79), (0, 0), ("", ""), (50, 40)], 4):
        assert write_declared(tmp_path / str(number), name, size)[0][1].shape[1] == 6
    assert not capsys.readouterr().out  # no box is outside the image itself


def test_boxes_outside_of_their_images_are_counted(tmp_path, capsys):
    """By more than a pixel. Without a declared size, the file's counts, upright."""
    (tmp_path / "lines").mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (100, 80)).save(tmp_path / "lines/turned.jpg", exif=turned)
    write_set(tmp_path / "lines", "lines", **{
        "train.txt": "a b.png -1,-0.5,60,50,1 90,5,103,20,0 200,5,300,20,0\nturned.jpg 0,0,81,101,0 0,0,83,9,0",
        "val.txt": "a b.png 20,30,60,50,1"})
    data.create_datasets("lines", tmp_path / "lines", 96, 0)
    said, = capsys.readouterr().out.splitlines()
    assert said == (f"--data-path {tmp_path}/lines: train: 3 of 5 boxes reach outside their images and are clipped or "
                    f"dropped; first {tmp_path}/lines/a b.png")
    for name in ("coco", "voc"):
        write_declared(tmp_path / name, name, (100, 80), (20, 30, 120, 50))
        assert f"{tmp_path}/{name}: train: 1 of " in capsys.readouterr().out.splitlines()[0]


def test_text_is_read_without_the_spaces_around_it(tmp_path, capsys):
    """An image of VOC may have spaces in its name, and a column of -1, 0 or 1 behind it; two names may be one class."""
    spaced = xml(voc_object(" dog\n", " 21", "31 ", 60, 50, more="<difficult> 1 </difficult>"), file="\n a b.png ")
    write_set(tmp_path, "voc", **{"ImageSets/Main/train.txt": "a b 1\n a b  -1 \nempty 1\nempty 1 \n",
                                  "Annotations/a b 1.xml": spaced, "Annotations/a b.xml": xml(
                                      voc_object("Dog", 1, 2, 3, 4), voc_object("cat", 1, 2, 3, 4), file="other.png")})
    write_image(tmp_path / "JPEGImages/other.png")
    train, _ = data.create_datasets("voc", tmp_path, 96, 0)
    assert train.classes == ["Dog", "cat", "dog"] and len(train) == 4
    assert train.samples[0][1].tolist() == [[-3, 20, 30, 60, 50]]
    assert [sample[0].name for sample in train.samples] == ["a b.png", "other.png", "empty.png", "empty.png"]
    said = capsys.readouterr().out.splitlines()[0]
    assert said == f"--data-path {tmp_path}: two classes are called 'Dog' and 'dog'; if they are one, merge them"
    (tmp_path / XML).write_text('<?xml version="1.0" encoding="latin-1"?>' + xml(voc_object("K\xe4fer", 1, 2, 3, 4)),
                                encoding="latin-1")
    (tmp_path / "ImageSets/Main/val.txt").write_text("a b")
    (tmp_path / "ImageSets/Main/train.txt").write_text("a\na b")
    assert data.create_datasets("voc", tmp_path, 96, 0)[0].classes == ["Dog", "K\xe4fer", "cat"]
    coco_set = write_set(tmp_path / "coco", "coco", **{JSON: json.dumps(
        coco() | {"categories": [{"id": 3, "name": " cat"}, {"id": 5, "name": "dog\n"}]})})
    assert data.create_datasets("coco", coco_set, 96, 0)[0].classes == ["cat", "dog"]


@pytest.mark.parametrize(("crowd", "label"), [("0", 1), ("1", -2), (False, 1), (True, -2), (None, 1),
                                              ("true", -2), (1.0, -2)])
def test_a_crowd_may_be_a_text(tmp_path, crowd, label):
    content = json.dumps(coco(annotation(1, 5, 20, 30, 40, 20, iscrowd=crowd)))
    train, _ = data.create_datasets("coco", write_set(tmp_path, "coco", **{JSON: content}), 96, 0)
    assert train.samples[0][1][0, 0] == label
    dog = voc_object("dog", 1, 2, 3, 4, more=f"<difficult>{crowd}</difficult>")
    difficult = xml(voc_object("cat", 1, 2, 3, 4), dog)
    train, _ = data.create_datasets("voc", write_set(tmp_path, "voc", **{XML: difficult}), 96, 0)
    assert train.samples[0][1][1, 0] == label


def test_a_file_name_in_xml_may_lack_its_extension(tmp_path):
    """As ImageNet's, and those of some versions of labelImg and Label Studio."""
    write_set(tmp_path, "voc", **{XML: xml(BOX, voc_object("cat", 1, 1, 9, 9), file="a b")})
    assert data.create_datasets("voc", tmp_path, 96, 0)[0].samples[0][0] == tmp_path / "JPEGImages/a b.png"


def test_boxes_of_coco_without_area_are_left_out_and_counted(tmp_path, capsys):
    data.create_datasets("coco", write_set(tmp_path, "coco"), 96, 0)
    assert capsys.readouterr().out.splitlines()[0] == (
        f"{tmp_path / JSON}: 1 of 3 boxes have a width or height of 0 and are left out; first: annotation 3")


def test_different_annotations_of_coco_may_have_the_same_id(tmp_path):
    content = coco(annotation(1, 5, 1, 2, 3, 4), annotation(1, 3, 1, 2, 3, 4), annotation(1, 5, 1, 2, 3, 4, image=8))
    write_set(tmp_path, "coco", **{JSON: json.dumps(content)})
    assert [len(rows) for _, rows, _ in data.create_datasets("coco", tmp_path, 96, 0)[0].samples] == [2, 1]


def test_lists_of_voc_may_have_paths_and_xml_may_lack_the_file_name(tmp_path):
    """As darknet's lists."""
    boxes = BOX, voc_object("cat", 1, 1, 9, 9)
    lines = "JPEGImages/a b.png", "/elsewhere/JPEGImages/a b.PNG 1", "/elsewhere/c.d", "sub/e.png", "a b.png"
    write_set(tmp_path, "voc", **{
        "ImageSets/Main/train.txt": "\n".join(lines), "Annotations/a b.xml": f"<a>{''.join(boxes)}</a>",
        "Annotations/c.d.xml": xml(*boxes, file=""), "Annotations/sub/e.xml": xml(*boxes, file="empty.png")})
    write_image(tmp_path / "JPEGImages/c.d.png")
    names = [path.name for path, _, _ in data.create_datasets("voc", tmp_path, 96, 0)[0].samples]
    assert names == ["a b.png", "a b.png", "c.d.png", "empty.png", "a b.png"]
    (tmp_path / "ImageSets/Main/val.txt").write_text("/elsewhere/JPEGImages/f.jpg")
    with pytest.raises(UsageError, match=f"{tmp_path}/Annotations/f.xml: No such file"):
        data.create_datasets("voc", tmp_path, 96, 0)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("listed", "stored"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_an_accent_may_be_a_letter(tmp_path, name, listed, stored):
    """As in the names of files that macOS wrote."""
    image, other = (normalize(form, "caf\xe9/\xe9.png") for form in (listed, stored))
    write_set(tmp_path, name, **{
        "train.txt": f"{image} 1,2,3,4,0", JSON: json.dumps(coco(annotation(1, 5, 1, 2, 3, 4), images=[image])),
        "ImageSets/Main/train.txt": normalize(listed, "\xe9"),
        normalize(stored, "Annotations/\xe9.xml"): xml(BOX, voc_object("cat", 1, 1, 9, 9), file=image)})
    write_image(tmp_path / IMAGES[name][0] / other)
    [(path, _, _)] = data.create_datasets(name, tmp_path, 96, 0)[0].samples
    assert path == tmp_path / IMAGES[name][0] / other


def test_the_path_of_an_image_may_have_spaces_and_numbers(tmp_path):
    write_set(tmp_path, "lines", **{"train.txt": "at 1,2,3,4,0 10,5 b.png  1,2,3,4,0 5,6,7e1,8.5,1"})
    write_image(tmp_path / "at 1,2,3,4,0 10,5 b.png")
    [(path, rows, _)] = data.create_datasets("lines", tmp_path, 96, 0)[0].samples
    assert path.name == "at 1,2,3,4,0 10,5 b.png" and rows.tolist() == [[0, 1, 2, 3, 4], [1, 5, 6, 70, 8.5]]


def test_scenes_do_not_depend_on_the_default_type():
    scenes = data.create_datasets("scenes", "", 64, 0)[0]
    expected = scenes.__getitems__(range(4))
    torch.set_default_dtype(torch.float64)
    try:
        images, labels = scenes.__getitems__(range(4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert labels.dtype == torch.float32 and equal((images, labels), expected)


@pytest.mark.parametrize(("name", "changes", "said"), [
    ("lines", {"classes.txt": "cat\n\ndog\n"}, "class 1 has an empty name"),  # as a line shifts all classes after it
    ("lines", {"classes.txt": " \n"}, "class 0 has an empty name"),
    ("voc", {XML: '<?xml version="1.0" encoding="klingon"?>' + xml(BOX)}, "a.xml: unknown encoding: klingon"),
    ("lines", {"train.txt": None}, "train.txt: No such file"),
    ("lines", {"train.txt": "a b.png 1,2,3,4,0\nb.png 1,2,3,4,0"}, "train.txt, line 2: no image .*b.png; "),
    ("lines", {"train.txt": "a b.png 1,2,x,4,0"}, "line 1: no image .*a b.png 1,2,x,4,0; .* a space and five numbers"),
    ("lines", {"train.txt": "a b.png 1,2,3,4,cat 1,2,3,4,0"}, "line 1: no image .*,cat; .* five numbers, x1,y1,x2,y2,"),
    ("lines", {"train.txt": "a b.png 1,nan,3,4,0"}, "line 1: no image .*a b.png 1,nan,3,4,0; .* five numbers"),
    ("lines", {"train.txt": "a b.png,1,2,3,4,0"}, "line 1: no image .*a b.png,1,2,3,4,0; .* is a space and five"),
    ("lines", {"train.txt": "a b.png 5,0"}, "line 1: 5,0 is not a box"),
    ("lines", {"train.txt": "a b.png 1,2,3,1e999,0"}, "line 1: 1,2,3,1e999,0 is not a box"),
    ("lines", {"train.txt": "\n"}, "--data-path .*: train lists no images"),
    ("lines", {"classes.txt": None, "train.txt": ""}, "--data-path .*: train lists no images"),
    ("voc", {"ImageSets/Main/val.txt": ""}, "--data-path .*: val lists no images"),
    ("lines", {"train.txt": "\na b.png 1,2,3,0"}, "train.txt, line 2: 1,2,3,0 is not a box"),
    ("lines", {"train.txt": "a b.png 1,2,3,4,0 1,2,3,4,5,0"}, "line 1: 1,2,3,4,5,0 is not a box"),
    ("lines", {"train.txt": "a b.png 9,2,3,4,0"}, "line 1: box 9,2,3,4,0 has no area"),
    ("lines", {"train.txt": "a b.png 1,2,3,4,2"}, "train.txt, line 1: class 2 is unknown"),
    ("lines", {"train.txt": "a b.png 1,2,3,4,-1"}, "line 1: class -1 is unknown"),
    ("lines", {"classes.txt": None, "train.txt": "a b.png 0,1,2,3,4"},  # the class comes first
     "train.txt: class 0 has no boxes, and class 4 has; the class is the last of five numbers"),
    ("lines", {"val.txt": "a b.png 1,2,3,4,1", "classes.txt": None, "train.txt": "a b.png"},
     "--data-path .*: train has no boxes"),
    ("coco", {JSON: None}, r"0 files match annotations/instances_train\*.json; keep exactly one"),
    ("coco", {"annotations/instances_train.json": "{}"}, "2 files"),
    ("coco", {JSON: '{\n"images": oops'}, "train2017.json: .*line 2"),
    ("coco", {JSON: "[]"}, "train2017.json, the file: TypeError.*see cocodataset"),
    ("coco", {JSON: '{"images": []}'}, r"train2017.json, the file: KeyError\('categories'\)"),
    ("coco", {JSON: '{"categories": [5]}'}, "train2017.json, the file: AttributeError.*see cocodataset"),
    ("coco", {JSON: json.dumps(coco({"id": 4, "image_id": 7}))}, r"annotations\[0\] has no category_id; see coco"),
    ("coco", {JSON: json.dumps(coco(annotation(4, 5, 1, 2, 3, 4), {"image_id": 7}))}, r"annotations\[1\] has no id; "),
    ("coco", {JSON: json.dumps(coco() | {"categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": None}]})},
     r"train2017.json: categories\[1\] has no name; see cocodataset"),
    ("coco", {JSON: json.dumps(coco(annotation(4, 5, 1, 2, 3, 4, image=99)))},
     "train2017.json, annotation 4: image_id 99 is not the id of one of the images; correct it"),
    ("coco", {JSON: json.dumps(coco(annotation(4, 5, 1, 2, 3, 4, image="7")))},
     r"annotation 4: image_id '7' is not the id of one of the images \(images has 7\); correct it"),
    ("coco", {JSON: json.dumps(coco(annotation(4, 0, 1, 2, 3, 4)))},
     "annotation 4: category_id 0 is not the id of one of the categories; correct it"),
    ("coco", {JSON: json.dumps(coco(annotation(4, "5", 1, 2, 3, 4)))},
     r"annotation 4: category_id '5' is not the id of one of the categories \(categories has 5\); correct it"),
    ("coco", {"annotations/instances_val2017.json": json.dumps(
        coco(annotation(4, 0, 1, 2, 3, 4)) | {"categories": [{"id": 0, "name": "ant"}]})},
     "image 7: class 0 is unknown"),
    ("coco", {JSON: json.dumps(coco(annotation(4, 5, 5)))}, "image 7: 5,5 is not a box"),
    ("coco", {JSON: json.dumps(coco(annotation(4, 5, 1, 2, 0)))}, "image 7: 1,2,0,5 is not a box"),
    ("coco", {JSON: json.dumps(coco(*[annotation(4, 5, 1, 2, 3, 4)] * 2))},
     "train2017.json: two annotations have the id 4; make the ids unique"),
    ("coco", {JSON: json.dumps(coco(annotation(4, 5, 1, 2, 3)))}, "image 7: 1,2,3,5 is not a box"),
    ("coco", {JSON: json.dumps(coco(annotation(4, 5, 1, 2, -3, 4)))}, "image 7: box 1,2,-3,4,5 has no area"),
    ("coco", {JSON: json.dumps(coco() | {"categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": " "}]})},
     "class 1 has an empty name"),
    ("coco", {JSON: json.dumps(coco() | {"categories": [{"id": 3, "name": "dog"}, {"id": 5, "name": "cat"}]})},
     "category . is '(dog' in train and 'cat|cat' in train and 'dog)' in val; use the same"),
    ("coco", {JSON: json.dumps(coco() | {"categories": [{"id": 3, "name": "cat"}, {"id": 3, "name": "dog"}]})},
     "train2017.json: two categories have the id 3; make the ids unique"),
    ("coco", {JSON: json.dumps({**coco(), "images": [{"id": 7, "file_name": "a b.png"}] * 2})},
     "train2017.json: two images have the id 7; make the ids unique"),
    ("coco", {JSON: json.dumps(coco(annotation(4, 5, 1, 2, 3, 4), images=["a b.png", "a b.png"]))},
     "image 8: .*image 7 lists other boxes for .*/a b.png; list an image once"),
    ("lines", {"train.txt": "a b.png 1,2,3,4,0\na b.png 5,6,7,8,1"},
     "line 2: .*line 1 lists other boxes for .*a b.png"),
    *[("lines", {"train.txt": f"a b.png {box},0"}, f"line 1: box {box},0 is in fractions of the image; multiply")
      for box in ("0.1,0.2,0.5,1", "0.5,0.5,0.2,0.3")],  # corners; center and size
    ("coco", {JSON: json.dumps(coco(annotation(4, 5, 0.5, 0.5, 0.3, 0.4)))}, "image 7: box .* fractions of the image"),
    ("voc", {XML: xml(voc_object("cat", 0.5, 0.25, 0.75, 1))}, "a.xml: box .* fractions of the image"),
    ("coco", {JSON: json.dumps(coco(images=["c.png"]))}, "image 7: no image .*train2017/c.png"),
    ("voc", {"ImageSets/Main/val.txt": None}, "val.txt: No such file"),
    ("voc", {XML: None}, "a.xml: No such file"),
    ("voc", {XML: "<annotation>\n<object>\n</annotation>"}, "a.xml: mismatched tag: line 3"),
    ("voc", {XML: xml(BOX, file="c.png")}, "a.xml: no image .*JPEGImages/c.png"),
    ("voc", {XML: xml(BOX, voc_object("cat", 1, 2, 3))}, "a.xml: 1,2,3,None,cat is not a box"),
    ("voc", {XML: xml(voc_object("cat", 5, 2, 4, 6))}, "a.xml: box 5,2,4,6,cat has no area"),
    ("voc", {XML: xml(voc_object(" ", 5, 2, 7, 6))}, "a.xml: class without a name is unknown"),
    ("voc", {XML: xml("<object><bndbox/></object>")}, "a.xml: .* is not a box"),
    ("voc", {XML: xml(voc_object("cat", 1, 2, 3, 4, more="<name>dog</name>"))}, "a.xml: one object has 2 times name;"),
    ("voc", {XML: xml(voc_object("cat", 1, 2, 3, 4, more="<bndbox><xmin>5</xmin></bndbox>"))},
     "a.xml: one object has 2 times bndbox/xmin; keep one"),
    ("voc", {XML: xml(BOX, "<filename>c.png</filename>")}, "a.xml: one annotation has 2 times filename"),
    ("voc", {"classes.txt": "dog"}, "a.xml: class cat is unknown; .*classes.txt")])
def test_a_mistake_in_a_file_is_named_in_one_line(tmp_path, name, changes, said):
    folder = write_set(tmp_path, name, **changes)
    with pytest.raises(UsageError, match=said) as raised:
        data.create_datasets(name, folder, 96, 0)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(("name", "size", "said"), [
    ("voc", 96, "--data-path .*/absent: no such folder"), ("scenes", 100, "--image-size 100: not a multiple of 32")])
def test_a_mistake_in_the_command_is_named(tmp_path, name, size, said):
    """A folder that does not exist, or a size without whole cells."""
    with pytest.raises(UsageError, match=said):
        data.create_datasets(name, tmp_path / "absent", size, 0)


@pytest.mark.parametrize("size", [(100, 80), (40, 300), (96, 96), (7, 5)])
def test_the_pixels_of_a_box_stay_in_it(tmp_path, size):
    """The test letterboxes and rescales wide, tall, square and small images."""
    box = [side * part // 10 for side, part in zip(size * 2, (2, 4, 7, 9))]
    write_image(tmp_path / "a.png", [box], size)
    line = f"a.png {','.join(map(str, box))},0"
    for part in "train", "val":
        (tmp_path / f"{part}.txt").write_text(line)
    _, val = data.create_datasets("lines", tmp_path, 96, 0)
    images, labels = val.__getitems__([0])
    for size in 96, 160, 64:
        resized, boxes = data.resize(images, labels, size)
        assert resized.dtype == torch.uint8 and resized.shape == (1, 3, size, size)
        ys, xs = torch.where(resized[0, 0] > 129)  # brighter than the bars, and half as bright as the box
        edges = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
        assert (edges - boxes[0, 2:]).abs().max() <= 1
    assert equal(data.resize(images, labels, 96), (images, labels))


def test_an_augmented_image_follows_from_seed_epoch_and_index_and_its_pixels_stay_in_their_boxes(tmp_path):
    for n in range(20):
        write_image(tmp_path / f"{n}.png", [(30, 20, 80, 50)] if n else [], (120, 70))
    text = "".join(f"{n}.png{' 30,20,80,50,0' * (n > 0)}\n" for n in range(20))
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "val.txt").write_text(text)
    train, _ = data.create_datasets("lines", tmp_path, 64, 0)
    first = train.__getitems__(range(20))
    for batch_size, workers in (20, 0), (3, 2):
        assert equal(batches(train, batch_size, workers), (first[0], first[1][:, 1:]))
    state = torch.random.get_rng_state()
    train[3]
    assert torch.equal(torch.random.get_rng_state(), state)
    train.set_epoch(1)
    for other in (train, data.create_datasets("lines", tmp_path, 64, 1)[0]):
        assert not any(map(torch.equal, other.__getitems__(range(1, 20))[0], first[0][1:]))
    for place, _, *box in first[1].tolist():
        ys, xs = torch.where(first[0][int(place), 0] > 200)  # jitter makes the box no darker than 0.7 * 0.7 * 255
        ys, xs = (ys, xs) if len(ys) else torch.where(first[0][int(place), 0] > 115)
        edges = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
        assert (edges - torch.tensor(box)).abs().max() <= 1.5
    assert len(first[1]) == 19 and len(first[1][:, 2:].unique(dim=0)) == 19


def test_anchors_are_the_means_of_the_boxes_that_they_fit_best():
    part = Subset(SCENES, range(256))
    found = data.anchors(part)
    assert found.shape == (9, 2) and torch.equal(found, data.anchors(part))
    assert (found.prod(1).diff() > 0).all()
    labels = torch.cat([SCENES[index][1] for index in range(256)])
    sizes = F.pad(labels[:, 4:] - labels[:, 2:4], (2, 0))
    nearest = box_iou(sizes, F.pad(found, (2, 0))).argmax(1)
    means = torch.stack([sizes[nearest == n, 2:].mean(0) for n in range(9)])
    assert torch.allclose(found, means, atol=0.01)  # k-means has converged


class Labels(list):
    def __getitem__(self, index):
        return None, torch.tensor(list.__getitem__(self, index)).reshape(-1, 6)


def test_anchors_of_boxes_of_nine_shapes_are_these_and_regions_to_ignore_have_none():
    shapes = [(2.0 ** n, 3.0 * 2 ** n) for n in range(9)]
    rows = [[[0, 2, 7, 7, 7 + width, 7 + height]] * 3 for width, height in shapes[::-1]]
    assert data.anchors(Labels([*rows, [], [[0, -1, 0, 0, 400, 400]]])).tolist() == [*map(list, shapes)]
    with pytest.raises(UsageError, match="no boxes"):
        data.anchors(Labels([[], [[0, -1, 0, 0, 400, 400]]]))
    assert torch.equal(data.anchors(Labels([rows[0]])), torch.tensor([shapes[-1]] * 9))


def test_the_sizes_of_multi_scale_training_are_those_of_the_paper():
    def sizes(side, seed):
        images = torch.zeros(1, 1, side, side, dtype=torch.uint8)
        found = [data.rescale(images, torch.zeros(0, 6), seed, epoch, step)[0].shape[-1]
                 for epoch in range(1, 9) for step in range(0, 160, 5)]
        assert found == [size for size in found[::2] for _ in range(2)]  # each for 10 steps
        return found

    assert {*sizes(416, 0)} == {*range(320, 609, 32)} and {*sizes(96, 0)} == {64, 96, 128}
    assert sizes(96, 0) == sizes(96, 0) != sizes(96, 1)


def test_regions_to_ignore_are_no_boxes():
    labels = torch.tensor([[0, 2.0], [0, -1], [1, 0], [1, 2], [1, -3]])
    assert data.count_boxes(F.pad(labels, (0, 4)), 4).tolist() == [1, 0, 2, 0]
    assert data.count_boxes(torch.zeros(0, 6), 2).tolist() == [0, 0]


def found(score, *box, place=0, label=0):
    return [place, *box, score, label]


ALL = 2 ** 10 - 1  # right at all ten thresholds


@pytest.mark.parametrize(("true", "detections", "results"), [
    ([[0, 0, 0, 0, 10, 10]], [found(0.9, 0, 0, 10, 10)], [ALL]),
    ([[0, 0, 0, 0, 10, 10]], [found(0.9, 0, 0, 10, 6)], [0b111]),  # IoU 0.6: right at 0.5, 0.55 and 0.6
    ([[0, 0, 0, 0, 10, 10]], [found(0.8, 0, 0, 10, 10), found(0.9, 0, 0, 10, 6)], [0b111, ALL - 0b111]),  # one each
    ([[0, 0, 0, 0, 10, 10]], [found(0.9, 0, 0, 10, 10, place=1), found(0.8, 0, 0, 10, 10, label=1)], [0, 0]),
    ([[0, 0, 0, 0, 10, 10], [0, 0, 0, 0, 10, 8]], [found(0.9, 0, 0, 10, 8), found(0.8, 0, 0, 10, 10)], [ALL, ALL]),
    ([], [found(0.9, 0, 0, 10, 10)], [0]),
    # of two boxes with IoU 2/3, COCO takes the last; the second detection is that one
    ([[0, 0, 0, 0, 10, 10], [0, 0, 4, 0, 14, 10]], [found(0.9, 2, 0, 12, 10), found(0.8, 4, 0, 14, 10)],
     [0b1111, ALL - 0b1111]),
    # a region to ignore: all of the detection lies in it, or 0.6 of it; another class does not
    ([[0, -1, 0, 0, 90, 90]], [found(0.9, 0, 0, 10, 10), found(0.8, 20, 0, 30, 10)], []),
    ([[0, -1, 0, 0, 90, 6]], [found(0.9, 0, 0, 10, 10)], [0b111 << 10]),
    ([[0, -2, 0, 0, 90, 90]], [found(0.9, 0, 0, 10, 10)], [0]),
    # a true box first, even where the region covers more
    ([[0, -1, 0, 0, 90, 90], [0, 0, 0, 0, 10, 8]], [found(0.9, 0, 0, 10, 10)], [0b1111111 + (0b111 << 17)]),
    ([[0, 0, 0, 0, 10, 10]], [], []),
    ([], [], []),
], ids=["exact", "0.6", "twice", "elsewhere", "best first", "no boxes", "equal IoUs", "region", "in part",
        "other region", "box and region", "nothing found", "nothing"])
def test_detections_match_true_boxes(true, detections, results):
    rows = mean_ap.match(torch.tensor(detections).reshape(-1, 7), torch.tensor(true).float().reshape(-1, 6))
    assert rows.dtype == torch.float32 and rows.shape == (len(results), 3)
    assert rows[:, 2].tolist() == results


@pytest.mark.parametrize(("rows", "boxes", "precision"), [
    ([[0, 0.9, ALL]], [1], 1),
    ([[0, 0.9, ALL]], [2], 51 / 101),  # recall 0.5: 51 of the recalls 0, 0.01, ...
    ([[0, 0.9, 0], [0, 0.8, ALL]], [1], 0.5),
    ([[0, 0.9, ALL], [0, 0.8, 0], [0, 0.7, ALL]], [2], (51 + 50 * 2 / 3) / 101),
    ([[0, 0.9, ALL << 10], [0, 0.8, ALL]], [1], 1),  # the first does not count
    ([[0, 0.9, ALL], [1, 0.9, 0]], [1, 0, 0], 1),  # classes without boxes do not count
    ([[0, 0.9, ALL]], [1, 3], 0.5),
    ([[0, 0.9, ALL], [0, 0.9, 0]], [1], 0.5),  # equal scores: the wrong one first
    ([], [2], 0), ([[0, 0.9, 0]], [0], 0), ([], [0, 0], 0)])
def test_average_precision_of_a_few_rows(rows, boxes, precision):
    found = mean_ap.average_precision(torch.tensor(rows).float().reshape(-1, 3), boxes)
    assert found == pytest.approx({"mAP50": precision, "mAP": precision}, abs=1e-12)
    assert found == mean_ap.average_precision(torch.tensor(rows[::-1]).reshape(-1, 3), torch.tensor(boxes).float())


def test_thresholds_above_half_count_in_the_mean():
    assert mean_ap.average_precision(torch.tensor([[0, 0.5, 0b111]]), [1]) == pytest.approx({"mAP50": 1, "mAP": 0.3})


def random_set(seed, images=12, classes=4):
    """Return labels with crowds and detections on a coarse grid, so that equal and exact IoUs are frequent."""
    generator = torch.Generator().manual_seed(seed)
    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).float()

    count = images * 6
    corners = draw(0, 40, count, 2)
    boxes, label, place = torch.cat([corners, corners + draw(4, 30, count, 2)], 1), draw(0, classes, count, 1), \
        draw(0, images, count, 1)
    labels = torch.cat([place, torch.where(draw(0, 100, count, 1) < 15, -1 - label, label), boxes], 1)
    near = draw(0, count, 3 * count).long()
    moved = boxes[near] + draw(-3, 4, 3 * count, 4)
    moved[:, 2:] = torch.maximum(moved[:, 2:], moved[:, :2] + 1)
    other = torch.where(draw(0, 100, 3 * count, 1) < 80, label[near], draw(0, classes, 3 * count, 1))
    return labels, torch.cat([place[near], moved, torch.rand(3 * count, 1, generator=generator), other], 1)


@pytest.mark.drill  # with the extras
def test_the_average_precision_is_that_of_pycocotools():
    reason = "no pycocotools: pip install -r requirements/drill.txt"
    api = pytest.importorskip("pycocotools.coco", reason=reason)
    evaluation = pytest.importorskip("pycocotools.cocoeval", reason=reason)
    crowds = 0
    for seed in range(20):
        labels, detections = random_set(seed)
        true = api.COCO()
        true.dataset = {"images": [{"id": place} for place in range(12)],
                        "categories": [{"id": label} for label in range(4)],
                        "annotations": [annotation(
                            number, int(max(label, -1 - label)), x1, y1, x2 - x1, y2 - y1, image=int(place),
                            iscrowd=int(label < 0), area=(x2 - x1) * (y2 - y1))
                            for number, (place, label, x1, y1, x2, y2) in enumerate(labels.tolist(), 1)]}
        true.createIndex()
        judge = evaluation.COCOeval(true, true.loadRes([
            {"image_id": int(place), "category_id": int(label), "score": score, "bbox": [x1, y1, x2 - x1, y2 - y1]}
            for place, x1, y1, x2, y2, score, label in detections.tolist()]), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
        rows = mean_ap.match(detections, labels)
        crowds += int((rows[:, 2] >= 2 ** 10).sum())
        ours = mean_ap.average_precision(rows, data.count_boxes(labels, 4))
        assert ours == pytest.approx({"mAP50": judge.stats[1], "mAP": judge.stats[0]}, abs=1e-12)
        assert 0.1 < ours["mAP"] < ours["mAP50"] < 0.7
    assert crowds > 100


def test_neither_the_order_nor_the_shares_of_the_images_change_the_average_precision():
    labels, detections = random_set(0)
    detections[:, 5] = (detections[:, 5] * 4).round() / 4  # many equal scores
    boxes = data.count_boxes(labels, 4)
    whole = mean_ap.match(detections, labels)
    expected = mean_ap.average_precision(whole, boxes)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randperm(12, generator=generator).chunk(1 + seed % 5)
        parts = []
        for share in images:
            own = [part[torch.isin(part[:, 0], share)] for part in (detections, labels)]
            found, true = (part[torch.randperm(len(part), generator=generator)] for part in own)
            parts.append(mean_ap.match(found, true))
        rows = torch.cat(parts)
        assert torch.equal(rows[np.lexsort(rows.T.numpy())], whole[np.lexsort(whole.T.numpy())])
        assert mean_ap.average_precision(rows, boxes) == expected


def test_pictures_show_the_boxes(tmp_path):
    images, labels = SCENES.__getitems__(range(16))
    data.save_preview(tmp_path / "new" / "preview.png", SCENES)
    preview = torch.from_numpy(np.array(Image.open(tmp_path / "new" / "preview.png")))
    assert preview.shape == (4 * 322 + 2, 4 * 322 + 2, 3)  # 16 tiles of 320 pixels, 2 between them

    def find(images):
        assert images.dtype == torch.uint8 and images.shape == (16, 3, 96, 96)
        return torch.tensor([found(0.9, 30, 30, 60, 60, place=5, label=3), found(0.2, 9, 9, 60, 60, place=6)])

    data.save_detections(tmp_path / "detections.png", SCENES, find)
    shown = torch.from_numpy(np.array(Image.open(tmp_path / "detections.png")))
    lime, red = ((shown == torch.tensor(color)).all(2) for color in ((0, 255, 0), (255, 0, 0)))
    assert (preview == torch.tensor([0, 255, 0])).all(2).sum() >= lime.sum() > 5000
    ys, xs = torch.where(red)
    assert all(322 < at < 644 for at in (ys.min(), xs.min(), ys.max(), xs.max()))  # in the sixth tile alone
    place, _, x1, y1, x2, y2 = (labels[0] * 10 / 3).round().int().tolist()
    assert lime[2 + y1 + 20:2 + y2 - 20, 2 + x1 - 2:2 + x1 + 3].any(1).all()


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProcessError, match="file/preview.png: cannot be written"):
        data.save_preview(tmp_path / "file" / "preview.png", SCENES)
