"""What the training scripts share: networks, data, checkpoints, one-line errors. No training loop lives here."""
