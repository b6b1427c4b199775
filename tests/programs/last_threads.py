"""A program around a script that prints, at the very end, which threads of the process are left.

    python tests/programs/last_threads.py train_DDP.py --epochs 1
"""
import atexit
import pathlib

from around import run_script

TASKS = pathlib.Path("/proc/self/task")

atexit.register(lambda: print("threads:", sorted((task / "comm").read_text().strip() for task in TASKS.iterdir())))
run_script()
