"""Image files: decoded by torchvision, with an error that names the file where that cannot be done."""
import io

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

from .errors import ProcessError

PNG_START = b"\x89PNG\r\n\x1a\n"


def decode(path):
    """Return an image file as `uint8` (3, H, W), upright; ProcessError, naming it, if it is no image."""
    try:
        content = np.fromfile(path, np.uint8)
        check_png(content)
        return decode_image(torch.from_numpy(content), mode=ImageReadMode.RGB, apply_exif_orientation=True)
    except (OSError, RuntimeError, SyntaxError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise ProcessError(f"{path}: cannot be read as an image ({reason}); mend or remove it") from None


def check_png(content):
    """Raise SyntaxError or OSError if the bytes are a PNG whose checksums are wrong; other formats pass.

    torchvision 0.29 crashes the whole process on damaged PNG data.
    """
    if content[:8].tobytes() == PNG_START:
        with Image.open(io.BytesIO(content)) as image:
            image.verify()
