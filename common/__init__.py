"""Shared code: networks, data, checkpoints and one-line errors, but no training loop.

Importing this package has no side effects: a script calls `report_errors` to install signal and exit handlers.
"""
