"""Language models: what only `train_lm.py` and its children use."""
