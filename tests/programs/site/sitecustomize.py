"""With Python's own threshold, the collector would take a seventh of the time to load torch and its compiler."""
import gc

gc.set_threshold(10_000)  # as in verify/running.py
