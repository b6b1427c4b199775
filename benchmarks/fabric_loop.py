"""Lightning Fabric's quick start: the same model and batches; plain SGD, torch's own layout, data as usual.

    torchrun --nproc-per-node=2 benchmarks/fabric_loop.py --dataset digits --model cnn --batch-size 64 --epochs 5
"""
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.contender import Pictures, make_parser, time_epochs  # noqa: E402
from common import datasets, launch, models  # noqa: E402


def main(args):
    torch.set_num_threads(launch.cores_per_process())
    world_size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator=args.device or "auto", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
                    strategy="ddp" if world_size > 1 else "auto")
    fabric.launch()
    torch.manual_seed(0)
    source, _ = datasets.create_datasets(args.dataset, args.data_path, 0, ".")
    loader = DataLoader(Pictures(source), args.batch_size // world_size, shuffle=True, drop_last=True)
    model = models.create_model(args.model, source.num_classes, source.image_shape)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, weight_decay=1e-4)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    def train_epoch(epoch):
        total_loss = 0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            total_loss += loss.item()

    time_epochs(args, len(loader), train_epoch, show=fabric.is_global_zero)


if __name__ == "__main__":
    main(make_parser(__doc__).parse_args())
