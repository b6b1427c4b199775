"""The loop that most published DDP examples have, for comparison: same model, same batches, same optimizer.

    torchrun --nproc-per-node=2 benchmarks/usual_ddp.py --dataset digits --model cnn --batch-size 64 --epochs 5

Each sample goes through PIL and torchvision's transforms, one at a time, in the main process (--workers 0) or in
workers; the loss is averaged over the processes and shown in every step.
"""
import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.usual import Pictures  # noqa: E402
from common import cli, datasets, models, reduce  # noqa: E402


def main(args):
    device = cli.select_device(args.device, int(os.environ.get("LOCAL_RANK", 0)))
    torch.set_num_threads(reduce.cores_per_process())
    dist.init_process_group(reduce.choose_backend(None, device))
    source, _ = datasets.create_datasets(args.dataset, args.data_path, 0, ".")
    train_set = Pictures(source)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler, drop_last=True,
                        num_workers=args.workers, pin_memory=device.type != "cpu")

    torch.manual_seed(0)
    model = models.create_model(args.model, source.num_classes, source.image_shape).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, weight_decay=1e-4)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
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
        seconds = time.perf_counter() - start
        if dist.get_rank() == 0:
            count = len(loader) * args.batch_size
            print(f"epoch {epoch:3}/{args.epochs}  {seconds:.3f} s  {count / seconds:,.0f} images/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-path", default="data")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device")
    main(parser.parse_args())
