"""Object detection, for `detection/train.py` and its children."""
