"""Language models, for `language/train.py` and its children."""
