"""Pairs of images: what only `loader.py` and its children use."""
