"""Language models, for `train_lm.py` and its children."""
