"""The loop of most published DDP examples: the same model and batches as the scripts, plain SGD.

    torchrun --nproc-per-node=2 -m benchmarks.loops.usual_ddp --dataset digits --model cnn --batch-size 64 --epochs 5

Each sample goes through PIL and torchvision's transforms, one at a time, in the process that trains. Every step reduces
and shows the loss. The model has torch's default memory layout, and all parameters have weight decay.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from benchmarks import loops


def prepare(args):
    device = loops.join(args)
    source, model = loops.load(args)
    train_set = loops.Pictures(source)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler, drop_last=True,
                        pin_memory=device.type != "cpu")
    model = DistributedDataParallel(model.to(device))
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

    return train_epoch, len(loader), dist.get_rank() == 0


if __name__ == "__main__":
    loops.run(__doc__, prepare)
