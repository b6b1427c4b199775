"""A small training script: builds loaders one after the other, in one group, and saves what it saw.

    PYTHONPATH=. torchrun --nproc-per-node=2 tests/programs/driver.py FOLDER

FOLDER/jobs.json lists the loaders and what is done with each. Two processes are as on two hosts, each the first of its
own: shares that went by LOCAL_RANK would be the same.
"""
import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common import errors

folder = sys.argv[1]


def train(loader):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 3, 3, padding=1)]
    network = torch.nn.Sequential(*layers)
    model, losses = DistributedDataParallel(network), []
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for images, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.l1_loss(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in network.parameters()]


def broken_off(loader):
    seen = [[next(iter(loader))]]
    seen.append(list(loader))
    loader.set_epoch(2)
    seen.append(list(loader))
    loader.set_epoch(7, skip=args.batch_size)
    seen.append(list(loader))
    loader.set_epoch(8, skip=(len(loader) - 1) * args.batch_size)
    seen += [list(loader), list(loader)]
    loader.set_epoch(1)
    return seen, [list(loader) for _ in range(9)]


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") == "2":
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for number, job in enumerate(json.loads(Path(folder, "jobs.json").read_text())):
        sys.argv[1:] = job["arguments"]
        module = importlib.import_module(job["script"])
        args = module.parse_args()
        if not number:
            module.join_group(args)
        result, loader = {}, None
        try:
            loader = module.build_loader(args)
            result["length"] = len(loader)
            if job["action"] in ("watch", "refused"):
                result["epochs"] = [list(loader) for _ in range(args.epochs)]
            else:
                result[job["action"]] = globals()[job["action"]](loader)
        except (errors.UsageError, errors.RunError) as error:
            if job["action"] != "refused":
                raise
            result["error"] = [type(error).__name__, str(error)]
            del loader, error
            gc.collect()  # or a process forked below would destroy what is left of its workers, and say so
        torch.save(result, Path(folder, f"{number}-{dist.get_rank()}.pt"))
