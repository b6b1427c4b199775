"""A program around a script, with a mirror for one of torchvision's data sets.

    python tests/programs/mirrored.py MIRROR RESOURCES train_DDP.py --dataset fashion-mnist

RESOURCES is a list of [file, MD5 sum] in JSON. FileLock logs when a process waits.
"""
import json
import logging
import sys

from around import run_script
from torchvision.datasets import FashionMNIST

logging.basicConfig()
logging.getLogger("filelock").setLevel("DEBUG")
FashionMNIST.mirrors = [sys.argv.pop(1)]
FashionMNIST.resources = json.loads(sys.argv.pop(1))
run_script()
