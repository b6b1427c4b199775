"""The bare step: nothing but DistributedDataParallel's step, on batches prepared in advance.

    torchrun --nproc-per-node=2 -m benchmarks.loops.bare_ddp --dataset digits --model cnn --batch-size 64 --epochs 5

It does not read, log or evaluate. With --alone there is no all-reduce either: each process trains independently.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import loops
from common import datasets, models


def prepare(args):
    device = loops.join(args)
    train_set, model = loops.load(args)
    normalize = datasets.Normalize(train_set).to(device)
    local_batch_size = args.batch_size // dist.get_world_size()
    batches = []
    for index in range(4):  # few enough for caches to hold them, like a loader's fresh batches
        samples = [(index * local_batch_size + n) % len(train_set) for n in range(local_batch_size)]
        images, labels = train_set.__getitems__(samples)
        images = normalize(images.to(device)).contiguous(memory_format=torch.channels_last)
        batches.append((images, labels.to(device)))
    model.to(device, memory_format=torch.channels_last)
    parallel_model = model if args.alone else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(models.parameter_groups(model, 1e-4), 0.001, 0.9)
    steps = len(train_set) // args.batch_size

    def train_epoch(epoch):
        for step in range(steps):
            images, labels = batches[step % len(batches)]
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel_model(images), labels)
            loss.backward()
            optimizer.step()
        loss.item()  # waits for the device

    return train_epoch, steps, dist.get_rank() == 0


if __name__ == "__main__":
    loops.run(__doc__, prepare, "--alone")
