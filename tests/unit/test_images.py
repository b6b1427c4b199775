"""Image files of all kinds are found and decoded to PIL's pixels, or rejected in one line that names the file."""
import io
import os
import struct
import sys
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, features
from torchvision.transforms.v2.functional import pil_to_tensor, resize

from common.errors import ProcessError, UsageError
from common.images import decode, decode_reduced, decode_with_torchvision, find_files
from common.pairs import pairs

Y, X = np.mgrid[0:90, 0:120]
COLOR = Image.fromarray(np.stack([2 * X, 2.8 * Y, X + Y], -1).astype(np.uint8))
DEEP = np.stack([500 * X, 700 * Y, 300 * (X + Y), 65535 - 500 * X], -1).astype(np.uint16)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # a quarter turn


def write_png(path, size, colour_type, samples, bits=16, extra=None):
    """Write a PNG of 16 bits a sample (PIL does not), or of the given bits; `samples` fill it, or claim to.

    `extra` is (type, content) of one more chunk.
    """
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def pack(row):
        if bits == 16:
            return row.astype(">u2").tobytes()
        return np.packbits(np.unpackbits(row.astype(np.uint8).reshape(-1, 1), axis=1)[:, -bits:]).tobytes()

    header = struct.pack(">IIBBBBB", *size, bits, colour_type, 0, 0, 0)
    rows = b"".join(b"\0" + pack(row) for row in samples)
    more = chunk(*extra) if extra else b""
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + more + chunk(b"IDAT", zlib.compress(rows))
                     + chunk(b"IEND", b""))


def append(path, write, more):
    """Write an image and bytes behind it, as phones do."""
    write(path)
    path.write_bytes(path.read_bytes() + more)


def without_adobe(path):
    """Write a CMYK JPEG without the marker by which Adobe says that its values are inverted."""
    COLOR.convert("CMYK").save(path, quality=95)
    content = path.read_bytes()
    place = content.find(b"\xff\xee")
    if place > 0:
        path.write_bytes(content[:place] + content[place + 2 + struct.unpack_from(">H", content, place + 2)[0]:])


def orientation(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif


def with_alpha(image):
    image.putalpha(Image.fromarray((2 * X).astype(np.uint8)))
    return image


GREY, PIXEL, ALPHA = COLOR.convert("L"), COLOR.crop((50, 50, 51, 51)), with_alpha(COLOR.convert("RGBA"))
ANIMATED = {"save_all": True, "append_images": [COLOR.rotate(180)]}
KINDS = {  # name: how to write it
    "colour.jpg": partial(COLOR.save, quality=95), "progressive.jpeg": partial(COLOR.save, progressive=True),
    "grey.jpg": GREY.save, "cmyk.jpg": partial(COLOR.convert("CMYK").save, quality=95),
    "turned.jpg": partial(COLOR.save, exif=TURNED),
    "damaged EXIF.jpg": partial(COLOR.save, exif=b"Exif\0\0MM\0\xd4nonsense"),
    "colour.png": COLOR.save, "COLOR.PNG": COLOR.save, "palette.png": COLOR.quantize(64).save,
    "palette with a transparent colour.png": partial(COLOR.quantize(64).save, transparency=3),
    "bits.png": COLOR.convert("1").save, "grey.png": GREY.save, "alpha.png": ALPHA.save,
    "grey with alpha.png": with_alpha(COLOR.convert("LA")).save, "turned.png": partial(COLOR.save, exif=TURNED),
    "animated.png": partial(COLOR.save, **ANIMATED),
    "colour.webp": COLOR.save, "alpha.webp": partial(ALPHA.save, lossless=True),
    "turned.webp": partial(COLOR.save, exif=TURNED), "animated.webp": partial(COLOR.save, **ANIMATED),
    "a GIF.jpg": partial(COLOR.save, format="GIF"),
    "an animated GIF.png": partial(COLOR.save, format="GIF", **ANIMATED),
    "a PNG.jpg": partial(COLOR.save, format="PNG"), "a BMP.jpg": partial(COLOR.save, format="BMP"),
    "colour.bmp": COLOR.save, "grey.BMP": GREY.save, "colour.tif": COLOR.save,
    "turned.tiff": partial(COLOR.save, exif=TURNED),
    "palette with a transparent colour.gif": partial(COLOR.quantize(64).save, transparency=3),
    "colour.jfif": partial(COLOR.save, quality=95), "colour.jpe": partial(COLOR.save, quality=95),
    "one pixel.png": PIXEL.save, "one pixel.jpg": PIXEL.save,
    "Käfer und 图像.jpg": COLOR.save}
RARE = {  # more of every model of color, depth and orientation
    **{f"orientation {turn}.{kind}": partial(COLOR.save, exif=orientation(turn), **options) for turn in range(1, 9)
       for kind, options in {"webp": {"lossless": True}, "png": {}, "jpg": {"quality": 95}}.items()},
    **{f"grey of {bits} bits.png": partial(write_png, size=(120, 90), colour_type=0, bits=bits,
                                           samples=(X + Y) * (2**bits - 1) // 210) for bits in (1, 2, 4)},
    "palette of 16.png": COLOR.quantize(16).save,
    "palette with alpha.png": partial(COLOR.quantize(16).save, transparency=bytes([0, 128, *[255] * 14])),
    **{f"{kind.decode()}.png": partial(write_png, size=(120, 90), colour_type=2, bits=8, samples=np.array(COLOR),
                                       extra=(kind, content)) for kind, content in {
        b"tRNS": bytes(6), b"gAMA": struct.pack(">I", 100_000), b"sBIT": bytes([5, 6, 5])}.items()},
    "profile.png": partial(COLOR.save, icc_profile=b"x" * 200),
    "grey with alpha.webp": partial(with_alpha(COLOR.convert("LA")).save, lossless=True),
    "a GIF with a transparent colour.png": partial(COLOR.quantize(32).save, format="GIF", transparency=0),
    "bytes behind.png": partial(append, write=COLOR.save, more=b"garbage" * 30),
    "bytes behind.jpg": partial(append, write=partial(COLOR.save, quality=95), more=bytes(700) + b"SEFH"),
    "no Adobe cmyk.jpg": without_adobe, "RGB.jpg": partial(COLOR.save, quality=95, keep_rgb=True),
    "411.jpg": partial(COLOR.save, quality=95, subsampling="4:1:1"),
    "comment.jpg": partial(COLOR.save, quality=95, comment=b"c" * 5000),
    "restarts.jpg": partial(COLOR.save, quality=95, restart_marker_blocks=3),
    "a row.jpg": partial(COLOR.crop((0, 0, 120, 1)).save, quality=95), "a column.png": COLOR.crop((0, 0, 1, 90)).save}
DEEP_KINDS = {"grey": (0, [0]), "colour": (2, [0, 1, 2]), "grey with alpha": (4, [0, 3]), "alpha": (6, [0, 1, 2, 3])}


@pytest.fixture(params=["as imported", "torchvision"])
def decoder(request, monkeypatch):
    """Decode with torchcodec, if it is installed, and with torchvision, which is used without torchcodec."""
    if request.param == "torchvision":
        monkeypatch.setattr("common.images.decode_image", decode_with_torchvision)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # PIL says so when the test converts one
@pytest.mark.parametrize("name", KINDS | RARE)
def test_pixels_are_those_of_pil(tmp_path, name, decoder):
    path = tmp_path / name
    (KINDS | RARE)[name](path)
    with Image.open(path) as image:
        expected = np.array(ImageOps.exif_transpose(image).convert("RGB") if "damaged" not in name
                            else image.convert("RGB"))
    pixels = decode(path)
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, *expected.shape[:2])
    if name in KINDS:
        assert expected.shape[:2] == ((120, 90) if "turned" in name else (1, 1) if "pixel" in name else (90, 120))
    difference = np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.max() <= (3 if path.suffix in (".jpg", ".jpeg", ".jpe", ".jfif") else 0)


def large_jpeg(width, height, mode="RGB", turn=1, kind="JPEG", **options):
    """Encode an image of about 12 smooth patches across, in which a shift would be visible."""
    cells = [length * 12 // min(width, height) for length in (height, width)]
    coarse = np.random.RandomState(2).randint(0, 256, (*cells, 3)).astype(np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.BICUBIC).convert(mode)
    exif, content = Image.Exif(), io.BytesIO()
    exif[0x0112] = turn
    picture.save(content, kind, quality=95, exif=exif, **options)
    return content.getvalue()


LARGE = {  # name: (how to encode it, the scale for a shorter side of 40 pixels)
    **{f"orientation {turn}": (large_jpeg(496, 336, turn=turn), 4) for turn in range(1, 10)},
    "orientation 7, grey": (large_jpeg(496, 336, "L", 7), 4),
    "progressive": (large_jpeg(336, 496, progressive=True), 4),
    "full chroma": (large_jpeg(336, 496, subsampling=0), 4),
    "two pictures": (large_jpeg(496, 336, kind="MPO", save_all=True, append_images=[COLOR]), 4),
    "1/8": (large_jpeg(640, 848), 8), "width by 4": (large_jpeg(644, 848), 4),
    "height by 2": (large_jpeg(640, 850), 2), "1/2": (large_jpeg(200, 160), 2),
    "odd width": (large_jpeg(641, 848), 1), "odd height": (large_jpeg(640, 847), 1),
    "a little lower": (large_jpeg(200, 158), 1), "a little narrower": (large_jpeg(158, 200), 1),
    "CMYK": (large_jpeg(496, 336, "CMYK"), 1)}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_jpeg_at_a_reduced_scale_becomes_the_same_picture(name):
    """After resizing, it is within 4 of 255 levels of PIL's resize of the full image. At full scale, decode's."""
    content, scale = LARGE[name]
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    pixels, (height, width) = decode_reduced("large.jpg", 40, content)
    assert (width, height) == picture.size and pixels.shape == (3, height // scale, width // scale)
    if scale == 1:
        assert torch.equal(pixels, decode("large.jpg", content))
    small = [width * 40 // min(width, height), height * 40 // min(width, height)]
    expected = np.array(picture.resize(small, Image.BILINEAR)).astype(int)
    difference = np.abs(resize(pixels, small[::-1], antialias=True).permute(1, 2, 0).numpy() - expected)
    assert difference.max() <= 4 and difference.mean() <= 0.6


@pytest.mark.parametrize("name", [*KINDS, "16 bits.png"])
def test_only_a_usual_jpeg_is_reduced_and_a_file_for_dali_is_the_whole_picture(tmp_path, name):
    """What is passed on to DALI as a bitmap has decode's pixels; the rest is the file; the size is decode's."""
    path = tmp_path / name
    KINDS.get(name, lambda path: write_png(path, (120, 90), 2, DEEP[..., :3]))(path)
    expected = decode(path)
    reduced = {"colour.jpg", "progressive.jpeg", "grey.jpg", "turned.jpg", "Käfer und 图像.jpg", "colour.jfif",
               "colour.jpe"}
    for side in (0, 10):
        pixels, size = decode_reduced(path, side)
        assert size == expected.shape[1:]
        if side and name in reduced:
            assert pixels.shape[1:] == tuple(length // 2 for length in size)
        else:
            assert torch.equal(pixels, expected)
    content, size = pairs.read_encoded(path)
    assert size == expected.shape[1:]
    if any(word in name for word in ("webp", "GIF", "gif", "BMP", "bmp", "tif", "cmyk", "damaged")):
        header = b"P6 %d %d 255\n" % size[::-1]
        assert content.tobytes() == header + expected.permute(1, 2, 0).contiguous().numpy().tobytes()
    else:
        assert content.tobytes() == path.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "a table"])
def test_a_damaged_jpeg_is_named_at_any_scale(damage, decoder):
    content = bytearray(large_jpeg(496, 336))
    if damage == "cut":
        del content[-2:]
    else:
        content[content.index(b"\xff\xc4") + 5] = 255  # more codes of one bit than there are
    messages = []
    for side in (0, 40):
        with pytest.raises(ProcessError) as caught:
            decode_reduced("large.jpg", side, bytes(content))
        messages.append(str(caught.value))
        assert messages[-1].startswith("large.jpg: cannot be read as an image (")
    assert damage != "cut" or messages[0] == messages[1]


@pytest.mark.parametrize("kind", DEEP_KINDS)
def test_16_bits_are_scaled_to_8(tmp_path, kind, decoder):
    colour_type, channels = DEEP_KINDS[kind]
    write_png(tmp_path / "deep.png", (120, 90), colour_type, DEEP[..., channels])
    expected = np.rint(DEEP[..., [0, 0, 0] if "grey" in kind else [0, 1, 2]] / 257)
    assert (decode(tmp_path / "deep.png").permute(1, 2, 0).numpy() == expected).all()


@pytest.mark.filterwarnings("error")  # PIL warns on standard error, and names no file
def test_more_pixels_than_the_limit_are_refused_undecoded(tmp_path, monkeypatch):
    monkeypatch.delenv("MAX_IMAGE_PIXELS", raising=False)
    write_png(tmp_path / "large.png", (30_000, 30_000), 2, DEEP)
    jpeg = io.BytesIO()
    COLOR.save(jpeg, "JPEG")
    place = jpeg.getvalue().index(b"\xff\xc0") + 5  # after the start of frame, its length and its precision
    jpeg.getbuffer()[place:place + 4] = struct.pack(">HH", 30_000, 30_000)
    (tmp_path / "large.jpg").write_bytes(jpeg.getvalue())
    COLOR.save(tmp_path / "large.webp")
    for name, size, limit, pixels in (("large.png", "30000x30000", "100,000,000", 900_000_000),
                                      ("large.jpg", "30000x30000", "100,000,000", 900_000_000),
                                      ("large.webp", "120x90", "10,799", 10800)):
        if name == "large.webp":
            monkeypatch.setenv("MAX_IMAGE_PIXELS", "10799")
        for read in (decode, pairs.read_encoded):
            with pytest.raises(ProcessError) as caught:
                read(tmp_path / name)
            assert str(caught.value) == (f"{tmp_path / name}: {size} pixels, more than {limit}; remove it, or set "
                                         f"MAX_IMAGE_PIXELS={pixels} in the environment")


def test_the_limit_can_be_raised_and_lowered(tmp_path, monkeypatch):
    COLOR.save(tmp_path / "colour.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # PIL's own limit does not count, and stays as it was
    monkeypatch.setenv("MAX_IMAGE_PIXELS", "10800")
    assert decode(tmp_path / "colour.png").shape == (3, 90, 120) and Image.MAX_IMAGE_PIXELS == 100
    monkeypatch.setenv("MAX_IMAGE_PIXELS", "1e9")
    with pytest.raises(UsageError, match="MAX_IMAGE_PIXELS=1e9"):
        decode(tmp_path / "colour.png")


def cut(path, source):
    path.write_bytes(source.read_bytes()[:source.stat().st_size * 2 // 3])


def test_a_color_profile_may_be_larger_than_a_megabyte(tmp_path, decoder):
    """Pillow refuses such a file by default (Pillow issues 2445 and 8363)."""
    COLOR.save(tmp_path / "a.png", icc_profile=bytes(3_000_000))
    assert torch.equal(decode(tmp_path / "a.png"), pil_to_tensor(COLOR))


@pytest.mark.skipif(not ("avif" in features.modules and features.check("avif")), reason="needs Pillow 11.3 or later")
def test_avif_is_decoded(tmp_path, decoder):
    COLOR.save(tmp_path / "a.avif", quality=100)
    assert find_files(tmp_path) == [str(tmp_path / "a.avif")]
    for image in decode(tmp_path / "a.avif"), pairs.decode_reduced(tmp_path / "a.avif", 8)[0]:
        assert (image.int() - pil_to_tensor(COLOR).int()).abs().float().mean() < 4


BAD = {
    "empty.jpg": lambda path, _: path.write_bytes(b""),
    "text.png": lambda path, _: path.write_text("no picture\n"),
    "missing.jpg": lambda path, _: path.symlink_to("nowhere.jpg"),
    "an icon.png": lambda path, _: COLOR.save(path, "ICO"),
    "16 bits.tif": lambda path, _: Image.fromarray(DEEP[..., 0]).save(path),
    **dict.fromkeys(["cut.jpg", "cut.png", "cut.webp", "cut GIF.jpg", "cut.bmp", "cut.tif"], cut)}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_image_is_named_in_one_line(tmp_path, name, decoder):
    path, source = tmp_path / name, tmp_path / "source"
    COLOR.save(source, {"cut.jpg": "JPEG", "cut.webp": "WEBP", "cut GIF.jpg": "GIF", "cut.bmp": "BMP",
                        "cut.tif": "TIFF"}.get(name, "PNG"))
    BAD[name](path, source)
    for read in (decode, pairs.read_encoded):
        with pytest.raises(ProcessError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: cannot be read as an image (")
        assert len(str(caught.value).splitlines()) == 1


def test_only_image_files_count_through_links_too(tmp_path, capsys):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for path in (folder / "b", folder / "folder.jpg", folder / ".hidden", elsewhere):
        path.mkdir(parents=True)
    for path in (folder / "b/2.jpg", folder / "b/1 ä.PNG", folder / "folder.jpg/3.webp", folder / "b/._2.jpg",
                 folder / ".hidden/4.jpg", elsewhere / "5.jpeg"):
        COLOR.save(path)
    for name in ("@eaDir", "b/__MACOSX", "lost+found", "$RECYCLE.BIN"):  # of a NAS, an archive and file systems
        (folder / name).mkdir()
        COLOR.save(folder / name / "2.jpg")
    for name in ("readme.txt", "b/6.HEIC", "b/7.heic", "LICENSE", ".DS_Store", "c.npy"):
        (folder / name).touch()
    if hasattr(os, "mkfifo"):  # not on Windows
        os.mkfifo(folder / "pipe.jpg")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "link.jpg").symlink_to(elsewhere / "5.jpeg")
    (folder / "broken.jpg").symlink_to(elsewhere / "6.jpeg")
    expected = ["b/1 ä.PNG", "b/2.jpg", "broken.jpg", "folder.jpg/3.webp", "link.jpg", "linked/5.jpeg"]
    assert find_files(folder) == [str(folder / name) for name in expected]
    said, = capsys.readouterr().out.splitlines()
    assert said == f"{folder}: these files are not used: 1 without an extension, 2 .heic, 1 .npy"
    find_files(folder / "linked")
    assert not capsys.readouterr().out
    (folder / "b" / "round").symlink_to(folder)
    with pytest.raises(UsageError, match="round: " if sys.platform == "win32" else "b/round.*symbolic links"):
        find_files(folder)
