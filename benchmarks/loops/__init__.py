"""Code shared by the loops that floor.py compares with the scripts. Each is a module here with a function `prepare`."""
import atexit
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks import measure
from common import datasets, devices, endings, launch, models, reduce


class Pictures(Dataset):
    """The data as most published examples read it: one PIL image at a time, through torchvision's transforms."""

    def __init__(self, source):
        self.images = source.images.permute(0, 2, 3, 1).squeeze(-1).contiguous().numpy()
        self.labels = source.labels.tolist()
        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if source.augment else []
        steps += [transforms.ToTensor(), transforms.Normalize(source.mean, source.std)]
        self.transform = transforms.Compose(steps)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def join(args):
    """Join the process group as the scripts do, and return this process's device."""
    device = devices.prepare(args.device, False, int(os.environ.get("LOCAL_RANK", 0)))
    torch.set_num_threads(launch.cores_per_process())
    dist.init_process_group(reduce.choose_backend(None, device))
    atexit.register(dist.destroy_process_group)
    return device


def load(args):
    """Return the training set and a new model, identical on all processes."""
    source, _ = datasets.create_datasets(args.dataset, args.data_path, 0, ".")
    torch.manual_seed(0)
    return source, models.create_model(args.model, source.num_classes, source.image_shape)


def load_usual(args, world_size):
    """Return a model, plain SGD and a loader, as a library's quick start creates them before preparing them."""
    source, model = load(args)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, weight_decay=1e-4)
    return model, optimizer, DataLoader(Pictures(source), args.batch_size // world_size, shuffle=True, drop_last=True)


def quick_start(model, optimizer, loader, backward):
    """Return the loop of both quick starts: a function that trains one epoch, and its number of steps."""
    def train_epoch(epoch):
        total_loss = 0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            backward(loss)
            optimizer.step()
            total_loss += loss.item()

    return train_epoch, len(loader)


def run(doc, prepare, *flags, **choices):
    """Train with what `prepare(args)` returns, and print the speed of each epoch as the scripts do."""
    parser = measure.make_parser(doc, epochs=5, batch_size=64, **choices)
    for flag in flags:
        parser.add_argument(flag, action="store_true", help="see above")
    with endings.report_errors():
        args = parser.parse_args()
        train_epoch, steps, prints = prepare(args)
        for epoch in range(1, args.epochs + 1):
            start = time.perf_counter()
            train_epoch(epoch)
            took = time.perf_counter() - start
            if prints:
                print(f"epoch {epoch:3}/{args.epochs}  {took:.3f} s  {steps * args.batch_size / took:,.0f} images/s")
