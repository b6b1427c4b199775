"""The loop that most published DDP examples have, for comparison: the same model and batches, plain SGD.

    torchrun --nproc-per-node=2 benchmarks/usual_ddp.py --dataset digits --model cnn --batch-size 64 --epochs 5

Each sample goes through PIL and torchvision's transforms, one at a time, in the process that trains; the loss is
averaged over the processes and shown in every step; torch's own memory layout, and weight decay for all parameters.
"""
import atexit
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.contender import Pictures, make_parser, time_epochs  # noqa: E402
from common import datasets, devices, launch, models, reduce  # noqa: E402


def main(args):
    device = devices.select_device(args.device, int(os.environ.get("LOCAL_RANK", 0)))
    torch.set_num_threads(launch.cores_per_process())
    dist.init_process_group(reduce.choose_backend(None, device))
    atexit.register(dist.destroy_process_group)
    source, _ = datasets.create_datasets(args.dataset, args.data_path, 0, ".")
    train_set = Pictures(source)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler, drop_last=True,
                        pin_memory=device.type != "cpu")

    torch.manual_seed(0)
    model = models.create_model(args.model, source.num_classes, source.image_shape).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, weight_decay=1e-4)

    def train_epoch(epoch):
        sampler.set_epoch(epoch)
        mean_loss = torch.zeros(1, device=device)
        bar = tqdm(loader, disable=dist.get_rank() != 0)
        for step, (images, labels) in enumerate(bar):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            mean_loss = (mean_loss * step + shown / dist.get_world_size()) / (step + 1)
            bar.desc = f"[epoch {epoch}] mean loss {mean_loss.item():.3f}"
            optimizer.step()
            optimizer.zero_grad()

    time_epochs(args, len(loader), train_epoch, show=dist.get_rank() == 0)


if __name__ == "__main__":
    main(make_parser(__doc__).parse_args())
