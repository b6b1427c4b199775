"""Pairs of images, for `loader.py` and its children."""
