"""Regression on tabular data with a sharded model: minimal/train_DDP.py with FSDP2.

    torchrun --nproc-per-node=2 minimal/train_FSDP.py
    torchrun --nproc-per-node=2 minimal/train_FSDP.py --device cpu     # if there are fewer than two GPUs

Each process stores a shard of the weights, gradients and optimizer state. best.pt contains the whole model.

Parent: train_DDP.py
"""
import argparse
import math
import os

import torch

# new # DDP
from torch import distributed as dist, nn
import torch.distributed.nn  # before a group exists, or it would keep gloo's threads until the very end

# new # FSDP
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def create_table(rows, seed):  # yours: the data
    """Return a generated dataset. Each sample is a tuple (features, target)."""
    numbers = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    features = numbers[:, :3]
    return TensorDataset(features, features.sin().sum(1, keepdim=True) + 0.5 * numbers[:, 3:])


@torch.inference_mode()
def evaluate(model, loader, device):  # yours: the loss, here and in main()
    """Return the mean loss over all samples as a float; each sample counts once."""
    model.eval()
    sums = torch.zeros(2, device=device)  # the sum of the losses, the number of samples
    for features, targets in loader:
        loss = nn.functional.mse_loss(model(features.to(device)), targets.to(device), reduction="sum")
        sums += torch.stack([loss, torch.full_like(loss, len(targets))])

    # new # DDP: sums over all processes are exact; a mean of means is not
    dist.all_reduce(sums)

    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=100, help="maximum number of passes over the table")
    parser.add_argument("--patience", type=int, default=6, help="stop after N epochs without improvement")
    parser.add_argument("--batch-size", type=int, default=48, help="samples per step, over ALL processes")
    parser.add_argument("--lr", type=float, default=0.02, help="initial learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed for the weights and the sample order")
    parser.add_argument("--device", help="cpu, cuda, xpu (default: cuda if available, else cpu)")
    parser.add_argument("--output", default="best.pt", help="file for the checkpoint of the best epoch")

    # new # DDP: torch.distributed.launch passes this option; torchrun does not
    parser.add_argument("--local-rank", type=int, help="ignored: LOCAL_RANK has the same value")

    args = parser.parse_args()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(args.seed)
    train_set, val_set = create_table(1000, seed=1), create_table(499, seed=2)
    if not 0 < args.batch_size <= len(train_set):
        parser.exit(2, f"error: --batch-size {args.batch_size}: the table has {len(train_set)} rows\n")

    # new # DDP: launchers set these variables, but plain python does not; for srun, use ../train_DDP.py
    if "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if args.batch_size % world_size:
        parser.exit(2, f"error: --batch-size {args.batch_size}: not a multiple of {world_size} processes\n")
    torch.get_device_module(device).set_device(local_rank)  # before anything uses the device
    device_id = None if device.type == "cpu" else local_rank  # without it, NCCL guesses the device
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device_id)

    # new # DDP: each process reads its share of each batch and, without padding, of the validation set
    sampler = DistributedSampler(train_set, seed=args.seed * 10**6, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, args.batch_size, sampler=range(rank, len(val_set), world_size))

    # new # FSDP: each forward pass needs every process, so all run the same number of validation batches
    share = range(rank, len(val_set), world_size)
    batches = math.ceil(len(val_set) / world_size / args.batch_size)
    val_loader = DataLoader(val_set, batch_sampler=[share[i::batches] for i in range(batches)])

    # new # FSDP: create the whole model in host memory; the same seed gives all processes the same weights
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))  # yours: the model

    # new # FSDP: gather weights block by block; average and shard gradients in each backward()
    mesh = dist.init_device_mesh(device.type, (world_size,))
    for block in model:  # yours: the blocks, such as the layers of a transformer
        fully_shard(block, mesh=mesh)
    parallel_model = fully_shard(model, mesh=mesh)

    torch.manual_seed(args.seed + rank)  # each process draws its own dropout

    optimizer = torch.optim.Adam(model.parameters(), args.lr)  # yours: the optimizer
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    best_loss, best_epoch = float("inf"), 0
    for epoch in range(1, args.epochs + 1):
        if epoch - best_epoch > args.patience:
            break

        # new # DDP: without this line, every epoch has the same order
        sampler.set_epoch(epoch)

        model.train()
        loss_sum = torch.zeros((), device=device)
        for features, targets in train_loader:
            optimizer.zero_grad()

            # new # DDP: call the wrapper, because its forward prepares the averaging
            loss = nn.functional.mse_loss(parallel_model(features.to(device)), targets.to(device))

            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(targets)

        # new # DDP: all processes get the same sum
        dist.all_reduce(loss_sum)

        train_loss = loss_sum.item() / (len(train_loader) * args.batch_size)
        val_loss, lr = evaluate(model, val_loader, device), scheduler.get_last_lr()[0]
        if math.isnan(val_loss):
            parser.exit(1, f"error: val_loss is nan in epoch {epoch}: lower --lr, or check the data\n")
        scheduler.step(val_loss)
        if val_loss < best_loss:
            best_loss, best_epoch = val_loss, epoch

            # new # FSDP: all processes send their shards; rank 0 gets the whole model, in host memory
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(model, options=options)
            state = {"model": weights, "epoch": epoch, "val_loss": val_loss}

        # new # DDP: only rank 0 saves and prints; below this line, change nothing that all ranks use
        if rank != 0:
            continue

        if epoch == best_epoch:
            torch.save(state, args.output + ".tmp")
            os.replace(args.output + ".tmp", args.output)  # a crash cannot leave half a checkpoint
        print(f"epoch {epoch:3}  loss {train_loss:.5f}  val_loss {val_loss:.5f}  lr {lr:g}")


if __name__ == "__main__":
    main()

    # new # DDP: only after success, because after a failure this could wait forever for other ranks
    dist.destroy_process_group()
