"""Regress on an endless stream of rows from shards; each rank saves its own position in its own shards.

A: torchrun --nproc-per-node=2 {}
B: torchrun --nproc-per-node=2 {}
Resume: out
Bug: datasets-8308: data: https://github.com/huggingface/datasets/issues/8308
    The stream starts again: iteration advances another object than the one whose state is saved.
Bug: datasets-7447: data: https://github.com/huggingface/datasets/issues/7447
    The epochs after a resume have only the samples that were left in the epoch of the resume.
Bug: prime-rl-1035: data: https://github.com/PrimeIntellect-ai/prime-rl/pull/1035
    The position of one rank is saved, and all ranks resume from it.
"""
import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

STEPS, BATCH, SHARDS, ROWS, SAVE_EVERY = 24, 12, 12, 8, 4


class Stream(IterableDataset):
    """The rows of a rank's shards, in another order in each epoch; some rows are dropped, as short documents are."""

    def __init__(self, rank, world):
        self.shards, self.state = range(rank, SHARDS, world), {"epoch": 0, "read": 0}

    def __iter__(self):
        state = self.state  # wrong datasets-8308: state = dict(self.state)
        # wrong datasets-7447: first, state["read"] = state["read"], 0
        while True:
            generator = torch.Generator().manual_seed(state["epoch"])
            rows = torch.randperm(len(self.shards) * ROWS, generator=generator).tolist()
            for row in rows[state["read"]:]:  # wrong datasets-7447: for row in rows[first + state["read"]:]:
                state["read"] += 1
                shard = self.shards[row // ROWS]
                numbers = torch.randn(6, generator=torch.Generator().manual_seed(shard * ROWS + row % ROWS))
                if numbers[0] > -1:
                    yield numbers[:5], numbers[:5].sin().sum(0, keepdim=True) + 0.1 * numbers[5:]
            state.update(epoch=state["epoch"] + 1, read=0)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs("out", exist_ok=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    stream, first = Stream(rank, world), 0
    if os.path.exists("out/done"):
        first = int(open("out/done").read())
        content = torch.load(f"out/step-{first}.pt")
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        stream.state = content["streams"][rank]  # wrong prime-rl-1035: stream.state = content["streams"][0]
    for step, (inputs, targets) in zip(range(first + 1, STEPS + 1), DataLoader(stream, BATCH // world)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if step % SAVE_EVERY == 0:
            streams = [None] * world
            dist.all_gather_object(streams, stream.state)
            if rank == 0:
                content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "streams": streams}
                torch.save(content, f"out/step-{step}.pt")
                with open("out/done.tmp", "w") as file:
                    file.write(str(step))
                os.replace("out/done.tmp", "out/done")
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
