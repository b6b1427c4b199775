"""Prints, as JSON, how this process was started: the variables that torch reads, and its number of cores.

    PYTHONPATH=. srun -n2 python tests/programs/how_started.py
"""
import json
import os

from common import launch

os.environ.update(launch.launch_environment())
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(json.dumps({name: os.environ[name] for name in names} | {"cores": launch.cores_per_process()}))
