"""Image files: find them, check them before decoding, and decode them, with errors that name the file."""
import contextlib
import io
import math
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError, features
from torchvision.transforms.v2.functional import pil_to_tensor

from .errors import ProcessError, UsageError, reason
from .reduce import is_main_process

EXTENSIONS: tuple[str, ...] = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
FORMATS: tuple[str, ...] = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")  # of the content; the extension may differ
if "avif" in features.modules and features.check("avif"):  # Pillow 11.3 or later
    EXTENSIONS, FORMATS = (*EXTENSIONS, ".avif"), (*FORMATS, "AVIF")
SYSTEM_FOLDERS = {"@eadir", "#recycle", "@recycle", "@recently-snapshot", "#snapshot", "__macosx", "lost+found",
                  "$recycle.bin", "system volume information"}  # of NAS devices, archivers and file systems
MAX_PIXELS = 100_000_000
FILE_ENDS = (b"\xff\xd9", b"IEND\xaeB`\x82")  # the last bytes of a complete JPEG or PNG
ORIENTATION = 0x0112  # the EXIF tag
FLIPS = ((), (2,), (1, 2), (1,))  # axes to flip for the orientations 1 to 4; 5 to 8 also need a transpose


def decode_with_torchvision(encoded: torch.Tensor) -> torch.Tensor:
    """Decode a file's bytes to an upright image, `uint8` of shape (3, H, W); scale 16-bit values to 8 bits."""
    from torchvision.io import ImageReadMode, decode_image

    pixels = decode_image(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    if pixels.dtype == torch.uint16:
        pixels = pixels.float().div_(257).round_().to(torch.uint8)  # 65535 / 257 = 255
    return pixels


try:
    # same pixels and speed as torchvision's, which torchvision 0.29 deprecates (github.com/pytorch/vision/pull/9609)
    from torchcodec.decoders import decode_image
except (ImportError, OSError, RuntimeError):  # not installed, older than 0.16, or not built for this torch
    decode_image = decode_with_torchvision


def is_hidden(name: str) -> bool:
    """Return whether a file or folder with this name belongs to the system, not to the data."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def find_files(folder: str | os.PathLike[str]) -> list[str]:
    """Return the sorted paths of the image files below `folder`; follow symbolic links and skip what `is_hidden`.

    A broken link is included, so that reading the images fails instead of silently using fewer. The main process prints
    how many files of other kinds there are, except texts. Raises UsageError for unreadable folders and link cycles.
    """
    others: Counter[str] = Counter()

    def find(folder: str | os.PathLike[str]) -> Iterator[str]:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if is_hidden(entry.name):
                continue
            if entry.is_dir():
                yield from find(entry.path)
            elif not entry.name.lower().endswith(EXTENSIONS):
                others[os.path.splitext(entry.name)[1].lower()] += 1
            elif entry.is_file() or entry.is_symlink():
                yield entry.path

    try:
        found = list(find(folder))
    except OSError as error:
        raise UsageError(f"{error.filename}: {reason(error)}") from None
    left = [f"{count} {kind or 'without an extension'}" for kind, count in others.items()
            if kind not in (".txt", ".md")]
    if left and is_main_process():
        print(f"{folder}: these files are not used: {', '.join(left)}")
    return found


def decode(path: str | os.PathLike[str], content: bytes | None = None) -> torch.Tensor:
    """Return the image in a file, `uint8` of shape (3, H, W): upright, without alpha, 16-bit values scaled to 8 bits.

    `content` is the file's bytes, by default read from `path`. Raises ProcessError, naming the file, as `read` does.
    """
    return _decode(path, *read(path, content))


def decode_reduced(path: str | os.PathLike[str], resize: int,
                   content: bytes | None = None) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return an image that the caller will resize, and its full (height, width); see `decode` for the rest.

    `resize` is the pixels that the shorter side will have (0: unchanged). A JPEG is decoded at 1/2, 1/4 or 1/8 of its
    size, at the smallest scale, if any, at which both sides are whole and the shorter has at least 2 * `resize`.
    """
    encoded, image = read(path, content)
    turn, width, scale = orientation(encoded, image), image.width, 1
    if resize and turn:
        most = math.gcd(8, *image.size)  # any other scale rounds the sides up, which shifts the pixels
        image.draft(None, (max(width // most, 2 * resize), max(image.height // most, 2 * resize)))
        scale = width // image.width
    if scale == 1:
        pixels = _decode(path, encoded, image)
    else:
        with _errors_name(path):
            pixels = pil_to_tensor(image).expand(3, -1, -1)  # a gray image has one channel
        pixels = (pixels.mT if turn > 4 else pixels).flip(FLIPS[(turn - 1) % 4])
    height, width = pixels.shape[1:]
    return pixels, (scale * height, scale * width)


def orientation(encoded: np.ndarray, image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, of a JPEG or PNG that all decoders read the same way; 0 for any other file.

    `encoded` and `image` are from `read`. CMYK, damaged EXIF and files with another ending may be read differently.
    """
    complete = encoded[-12:].tobytes().endswith(FILE_ENDS)
    if not complete or image.format not in ("JPEG", "MPO", "PNG") or image.mode == "CMYK":
        return 0
    exif = Image.Exif()  # ignores XMP, like the decoders and unlike image.getexif()
    try:
        exif.load(image.info.get("exif", b""))
    except (SyntaxError, struct.error):
        return 0
    turn = exif.get(ORIENTATION, 1)
    return turn if turn in range(1, 9) else 1


def _decode(path: str | os.PathLike[str], encoded: np.ndarray, image: Image.Image) -> torch.Tensor:
    with _errors_name(path):
        if image.mode[0] in "IF" and image.format == "TIFF":  # "I;16": PIL would clip its values, not scale them
            raise ValueError(f"its pixels are {image.mode}, not 8-bit: save it as a PNG")
        if image.format not in ("JPEG", "MPO", "PNG"):  # PIL returns the first frame of an animation
            return pil_to_tensor(ImageOps.exif_transpose(image).convert("RGB"))
        return decode_image(torch.from_numpy(encoded))


def read(path: str | os.PathLike[str], content: bytes | None = None) -> tuple[np.ndarray, Image.Image]:
    """Return the bytes of an image file, `uint8` (size,), and its `PIL.Image`, with only the header decoded.

    `content` is the file's bytes if the caller has read them. Raises ProcessError, naming the file, if it is not an
    image, if it is a PNG with wrong checksums, which crashes torchvision 0.29, or if it has more than MAX_IMAGE_PIXELS.
    """
    limit = os.environ.get("MAX_IMAGE_PIXELS", str(MAX_PIXELS))
    if not limit.isdecimal():
        raise UsageError(f"MAX_IMAGE_PIXELS={limit}: not a whole number")
    with _errors_name(path):
        content = Path(path).read_bytes() if content is None else content
        encoded = np.frombuffer(bytearray(content), np.uint8)  # torch needs writable memory
        PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY  # 64 MB; color profiles can be larger than 1 MB
        pil_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # PIL's error would not name the file
        try:
            image = Image.open(io.BytesIO(encoded.data), formats=FORMATS)
        finally:
            Image.MAX_IMAGE_PIXELS = pil_limit
    width, height = image.size
    if width * height > int(limit):
        raise ProcessError(f"{path}: {width}x{height} pixels, more than {int(limit):,}; remove it, or set "
                           f"MAX_IMAGE_PIXELS={width * height} in the environment")
    if image.format == "PNG":
        with _errors_name(path):
            image.verify()
    return encoded, image


@contextlib.contextmanager
def _errors_name(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except UnidentifiedImageError:
        why = f"not one of {', '.join(FORMATS)}"
    except (OSError, RuntimeError, SyntaxError, ValueError, EOFError, struct.error) as error:
        why = reason(error)
    else:
        return
    raise ProcessError(f"{path}: cannot be read as an image ({why}); replace or remove it")
