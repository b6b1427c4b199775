"""The bare step of the detector: nothing but DistributedDataParallel's step, on batches prepared in advance.

    torchrun --nproc-per-node=2 -m benchmarks.loops.bare_yolov3 --dataset scenes --model tiny --batch-size 16

It does not read, log or evaluate, and each process knows the total number of boxes in advance.
"""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import loops
from common import datasets, models, reduce
from common.detection import data, yolov3


def prepare(args):
    device = loops.join(args)
    train_set, _ = data.create_datasets(args.dataset, args.data_path, 96, 0)
    torch.manual_seed(0)
    model = yolov3.create_model(args.model, train_set.num_classes, data.anchors(train_set))
    normalize = datasets.Normalize(train_set).to(device)
    local_batch_size = args.batch_size // dist.get_world_size()
    batches = []
    for index in range(4):  # few enough for caches to hold them, like a loader's fresh batches
        start = (index * dist.get_world_size() + dist.get_rank()) * local_batch_size
        images, labels = train_set.__getitems__(range(start, start + local_batch_size))
        images = normalize(images.to(device)).contiguous(memory_format=torch.channels_last)
        count = reduce.reduce_sum(torch.tensor(len(labels), device=device))
        batches.append((images, labels.to(device), dist.get_world_size() / count))
    model.to(device, memory_format=torch.channels_last)
    parallel_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(models.parameter_groups(model, 1e-4), 0.001, 0.9, nesterov=True)
    steps = len(train_set) // args.batch_size

    def train_epoch(epoch):
        for step in range(steps):
            images, labels, share = batches[step % len(batches)]
            optimizer.zero_grad()
            loss = yolov3.loss(parallel_model(images), labels) * share
            loss.backward()
            optimizer.step()
        loss.item()  # waits for the device

    return train_epoch, steps, dist.get_rank() == 0


if __name__ == "__main__":
    loops.run(__doc__, prepare, datasets=data.DATASETS, models=yolov3.MODELS)
