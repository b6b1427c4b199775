"""The bare step: nothing but DistributedDataParallel's step, on batches prepared in advance.

    torchrun --nproc-per-node=2 -m benchmarks.loops.bare_ddp --dataset digits --model cnn --batch-size 64 --epochs 5
    torchrun --nproc-per-node=2 -m benchmarks.loops.bare_ddp --dataset scenes --model tiny --batch-size 16

This loop does not read data, log or evaluate. For the detector, each process knows the total number of boxes in
advance. With --alone there is no all-reduce either: each process trains independently.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import loops
from common import datasets, models, reduce
from common.detection import data, yolov3


def load(args):
    """Return the training set, a new model and whether it is a detector."""
    if args.model not in yolov3.MODELS:
        return *loops.load(args), False
    train_set, _ = data.create_datasets(args.dataset, args.data_path, 96, 0)
    torch.manual_seed(0)
    return train_set, yolov3.create_model(args.model, train_set.num_classes, data.anchors(train_set)), True


def prepare(args):
    device = loops.join(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, model, detects = load(args)
    normalize = datasets.Normalize(train_set).to(device)
    local_batch_size = args.batch_size // world_size
    batches = []
    for index in range(4):  # few enough for caches to hold them, like a loader's fresh batches
        first = (index * world_size + rank) * local_batch_size
        images, labels = train_set.__getitems__([(first + n) % len(train_set) for n in range(local_batch_size)])
        images = normalize(images.to(device)).contiguous(memory_format=torch.channels_last)
        boxes = reduce.reduce_sum(torch.tensor(len(labels), device=device))
        batches.append((images, labels.to(device), world_size / boxes))
    model.to(device, memory_format=torch.channels_last)
    parallel_model = model if args.alone else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(models.parameter_groups(model, 1e-4), 0.001, 0.9, nesterov=detects)
    steps = len(train_set) // args.batch_size

    def train_epoch(epoch):
        for step in range(steps):
            images, labels, share = batches[step % len(batches)]
            optimizer.zero_grad()
            outputs = parallel_model(images)
            loss = yolov3.loss(outputs, labels) * share if detects else F.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
        loss.item()  # waits for the device

    return train_epoch, steps, rank == 0


if __name__ == "__main__":
    loops.run(__doc__, prepare, "--alone", datasets=[*datasets.DATASETS, *data.DATASETS],
              models=[*models.MODELS, *yolov3.MODELS])
