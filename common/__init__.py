"""Shared code: networks, data, checkpoints and one-line errors, but no training loop; importing it changes nothing."""
