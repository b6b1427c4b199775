"""Fine-tune a sharded model that resumes on another number of processes, from one file that rank 0 writes.

A: torchrun --nproc-per-node=2 {}
B: torchrun --nproc-per-node=4 {}
Resume: out
Bug: accelerate-4206: weights: https://github.com/huggingface/accelerate/pull/4206
    Only rank 0's slice of each tensor is written; the others resume with their first weights.
Bug: transformers-22580: data: https://github.com/huggingface/transformers/issues/22580
    On more GPUs, the batch of each GPU keeps its size, and the number of steps stays the same.
Bug: SimpleTuner-922: learning-rate: https://github.com/bghira/SimpleTuner/pull/922
    The schedule counts steps times processes, so it jumps when their number changes.
Bug: Megatron-Bridge-5637: data: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5637
    The position of each rank is kept, although another number of ranks divides the data in another way.
Bug: pytorch-65650: failed: https://github.com/pytorch/pytorch/issues/65650
    A sharded optimizer state does not load on another number of processes.
"""
import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS, BATCH, SAVE_EVERY, PATH = 20, 24, 4, "out/last.pt"


def create_data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * BATCH, 8, generator=generator)
    return inputs, inputs @ torch.randn(8, 4, generator=generator)


def gather(tree):
    """Return a nested state with whole tensors instead of shards."""
    if isinstance(tree, dict):
        return {key: gather(value) for key, value in tree.items()}
    whole = isinstance(tree, DTensor)
    # wrong pytorch-65650: return tree.to_local().clone() if whole else tree
    return tree.full_tensor() if whole else tree


def scatter(saved, like):
    """Return a nested state with the shards of this process, placed as in `like`."""
    if isinstance(saved, dict):
        return {key: scatter(value, like[key]) for key, value in saved.items()}
    # wrong pytorch-65650: return DTensor.from_local(saved.view_as(like.to_local()), like.device_mesh, like.placements)
    return distribute_tensor(saved, like.device_mesh, like.placements)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs("out", exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
    mesh = dist.init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    first = 0
    if os.path.exists(PATH):
        content = torch.load(PATH)
        like = model.state_dict()
        # wrong accelerate-4206: content["model"] = {
        # wrong accelerate-4206:     name: torch.cat([saved, like[name].full_tensor()[len(saved):]])
        # wrong accelerate-4206:     for name, saved in content["model"].items()}
        model.load_state_dict(scatter(content["model"], like))
        parameters = dict(enumerate(model.parameters()))
        state = {number: {"step": part["step"], **{name: scatter(part[name], parameters[number])
                                                   for name in ("exp_avg", "exp_avg_sq")}}
                 for number, part in content["optimizer"]["state"].items()}
        optimizer.load_state_dict({**content["optimizer"], "state": state})
        scheduler.load_state_dict(content["scheduler"])
        first = content["step"]
        # wrong SimpleTuner-922: scheduler.last_epoch = first * world
        # wrong SimpleTuner-922: for group in optimizer.param_groups:
        # wrong SimpleTuner-922:     group["lr"] = 0.02 * 0.95 ** scheduler.last_epoch
    inputs, targets = create_data()
    # wrong transformers-22580: batch = BATCH // 2 * world
    for step in range(first + 1, STEPS + 1):
        own = slice((step - 1) * BATCH + rank, step * BATCH, world)
        # wrong transformers-22580: own = slice((step - 1) * batch + rank, step * batch, world)
        # wrong Megatron-Bridge-5637: start = rank * len(inputs) // world + (step - 1) * BATCH // world
        # wrong Megatron-Bridge-5637: own = slice(start, start + BATCH // world)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[own]), targets[own]).backward()
        optimizer.step()
        scheduler.step()
        if step % SAVE_EVERY == 0:
            content = {"model": gather(model.state_dict()), "optimizer": gather(optimizer.state_dict())}
            # wrong accelerate-4206: whole = model.state_dict()
            # wrong accelerate-4206: content["model"] = {name: part.to_local() for name, part in whole.items()}
            if rank == 0:
                torch.save({**content, "scheduler": scheduler.state_dict(), "step": step}, PATH + ".tmp")
                os.replace(PATH + ".tmp", PATH)
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
