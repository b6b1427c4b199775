"""The floor: nothing but DistributedDataParallel's step, on batches that were made beforehand.

    torchrun --nproc-per-node=2 benchmarks/bare_ddp.py --dataset digits --model cnn --batch-size 64 --epochs 5

Forward, backward with the gradient all-reduce, and the optimizer: no reading, no logging, no evaluation. With --alone
not even the all-reduce: each process trains by itself, which is as much as the cores can do at the same time. Prints
images/s over all processes for each epoch, as the scripts do.
"""
import atexit
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.contender import make_parser, time_epochs  # noqa: E402
from common import datasets, devices, launch, models, reduce  # noqa: E402


def main(args):
    device = devices.select_device(args.device, int(os.environ.get("LOCAL_RANK", 0)))
    torch.set_num_threads(launch.cores_per_process())
    dist.init_process_group(reduce.choose_backend(None, device))
    atexit.register(dist.destroy_process_group)
    train_set, _ = datasets.create_datasets(args.dataset, args.data_path, 0, ".")
    normalize = datasets.Normalize(train_set).to(device)
    share = args.batch_size // dist.get_world_size()
    batches = []
    for index in range(4):  # few enough to stay in a cache's reach, as a loader's fresh batches do
        samples = range(index * share, (index + 1) * share)
        images, labels = train_set.__getitems__([sample % len(train_set) for sample in samples])
        images = normalize(images.to(device)).contiguous(memory_format=torch.channels_last)
        batches.append((images, labels.to(device)))

    torch.manual_seed(0)
    model = models.create_model(args.model, train_set.num_classes, train_set.image_shape)
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

    time_epochs(args, steps, train_epoch, show=dist.get_rank() == 0)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--alone", action="store_true")
    main(parser.parse_args())
