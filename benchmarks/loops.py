"""The loops that floor.py compares with the scripts. All train the scripts' model on their batches.

    torchrun --nproc-per-node=2 -m benchmarks.loops usual --model cnn --batch-size 64 --epochs 5
    torchrun --nproc-per-node=2 -m benchmarks.loops bare --dataset scenes --model tiny --batch-size 16
    torchrun --nproc-per-node=2 -m benchmarks.loops bare --dataset stdlib --model gpt_tiny --bf16

bare: nothing but DistributedDataParallel's step, on batches prepared in advance. It does not read data, log
    or evaluate. For the detector, each process knows the total number of boxes in advance. It also trains the
    language model, and in 16 bits with --bf16.
alone: the bare step without an all-reduce: each process trains independently.
usual: the loop of most published DDP examples, with plain SGD. Each sample goes through PIL and torchvision's
    transforms, one at a time, in the process that trains. Every step reduces and shows the loss. The model has
    torch's default memory layout, and all parameters have weight decay.
accelerate, lightning_fabric: the quick starts of these libraries, with plain SGD and usual's data.
"""
import atexit
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms
from tqdm import tqdm

from benchmarks import measure
from common import cli, datasets, devices, launch, models, reduce
from detection import data, yolov3
from language import gpt, text


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
    backend = reduce.choose_backend(None, device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    atexit.register(dist.destroy_process_group)
    return device


def load(args):
    """Return the training set, a new model, identical on all processes, and the loss."""
    torch.manual_seed(0)
    if args.model in gpt.SIZES:
        source, _ = text.create_datasets(args.dataset, args.data_path, args.length, args.windows, 0)
        return source, gpt.GPT(gpt.SIZES[args.model], source.vocabulary), gpt.loss
    if args.model in yolov3.MODELS:
        source, _ = data.create_datasets(args.dataset, args.data_path, 96, 0)
        return source, yolov3.create_model(args.model, source.num_classes, data.anchors(source)), yolov3.loss
    source, _ = datasets.create_datasets(args.dataset, args.data_path, 0)
    return source, models.create_model(args.model, source.num_classes, source.image_shape), F.cross_entropy


def prepare_bare(args):
    device = join(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, model, criterion = load(args)
    detects = criterion is yolov3.loss
    normalize = datasets.Normalize(train_set).to(device)
    local_batch_size = args.batch_size // world_size
    batches = []
    for index in range(4):  # few enough for caches to hold them, like a loader's fresh batches
        first = (index * world_size + rank) * local_batch_size
        inputs, targets = train_set.__getitems__([(first + n) % len(train_set) for n in range(local_batch_size)])
        inputs = normalize(inputs.to(device))
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        boxes = reduce.reduce_sum(torch.tensor(len(targets), device=device))
        batches.append((inputs, targets.to(device), world_size / boxes))
    models.to_device(model, device)
    parallel_model = model if args.loop == "alone" else DistributedDataParallel(model)
    groups = models.parameter_groups(model, 1e-4)
    if criterion is gpt.loss:
        optimizer = torch.optim.AdamW(groups, 0.001, (0.9, 0.95), fused=True)
    else:
        optimizer = torch.optim.SGD(groups, 0.001, 0.9, nesterov=detects)
    steps = len(train_set) // args.batch_size

    def train_epoch(epoch):
        for step in range(steps):
            inputs, targets, share = batches[step % len(batches)]
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = criterion(parallel_model(inputs), targets) * (share if detects else 1)
            loss.backward()
            optimizer.step()
        loss.item()  # waits for the device

    return train_epoch, steps


def prepare_usual(args):
    device = join(args)
    source, model, _ = load(args)
    train_set = Pictures(source)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler, drop_last=True,
                        pin_memory=device.type != "cpu")
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, weight_decay=1e-4)

    def train_epoch(epoch):
        sampler.set_epoch(epoch)
        mean_loss = torch.zeros(1, device=device)
        bar = tqdm(loader, disable=dist.get_rank() != 0)
        for step, (inputs, targets) in enumerate(bar):
            loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            mean_loss = (mean_loss * step + shown / dist.get_world_size()) / (step + 1)
            bar.desc = f"[epoch {epoch}] mean loss {mean_loss.item():.3f}"
            optimizer.step()
            optimizer.zero_grad()

    return train_epoch, len(loader)


def prepare_quick_start(args):
    source, model, _ = load(args)
    world_size = int(os.environ["WORLD_SIZE"])
    loader = DataLoader(Pictures(source), args.batch_size // world_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, weight_decay=1e-4)
    if args.loop == "accelerate":
        from accelerate import Accelerator

        # without an accelerator and without cpu=True, each process would silently train a separate model
        library = Accelerator(cpu=args.device == "cpu" or not torch.accelerator.is_available())
        atexit.register(library.end_training)
        model, optimizer, loader = library.prepare(model, optimizer, loader)
    else:
        from lightning_fabric import Fabric

        library = Fabric(accelerator=args.device or "auto", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
                         strategy="ddp" if world_size > 1 else "auto")
        library.launch()
        model, optimizer = library.setup(model, optimizer)
        loader = library.setup_dataloaders(loader)

    def train_epoch(epoch):
        total_loss = 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            library.backward(loss)
            optimizer.step()
            total_loss += loss.item()

    return train_epoch, len(loader)


LOOPS = {"bare": prepare_bare, "alone": prepare_bare, "usual": prepare_usual,
         "accelerate": prepare_quick_start, "lightning_fabric": prepare_quick_start}


def main():
    """Train, and print the speed of each epoch as the scripts do."""
    parser = measure.make_parser(__doc__, epochs=5, batch_size=64, models=[*models.MODELS, *yolov3.MODELS, *gpt.SIZES],
                                 datasets=[*datasets.DATASETS, *data.DATASETS, *text.DATASETS])
    parser.add_argument("loop", choices=LOOPS, help="see above")
    parser.add_argument("--bf16", action="store_true", help="bare: run the forward pass in autocast")
    parser.add_argument("--length", type=cli.positive_int, default=128, help="tokens in a window")
    parser.add_argument("--windows", type=cli.positive_int, default=1792, help="windows in an epoch")
    args = parser.parse_args()
    train_epoch, steps = LOOPS[args.loop](args)
    torch.set_num_threads(launch.cores_per_process())  # after Accelerator(), which changes this number
    device = devices.select_device(args.device, int(os.environ["LOCAL_RANK"]))
    size, unit = (args.length, "tokens") if args.model in gpt.SIZES else (1, "images")
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        train_epoch(epoch)
        took = time.perf_counter() - start
        if os.environ["RANK"] == "0":
            speed = steps * args.batch_size * size / took
            print(f"epoch {epoch:3}/{args.epochs}  {took:.3f} s  {speed:,.0f} {unit}/s{devices.peak_memory(device)}")


if __name__ == "__main__":
    with cli.report_errors():
        main()
