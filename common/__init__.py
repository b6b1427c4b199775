"""What the scripts share: networks, data, checkpoints, one-line errors. No training loop lives here.

Importing any of it changes nothing in the process: handlers of signals and of exits are set where a script starts.
"""
