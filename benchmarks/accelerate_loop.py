"""Hugging Face Accelerate's quick start: the same model and batches; plain SGD, torch's own layout, data as usual.

    torchrun --nproc-per-node=2 benchmarks/accelerate_loop.py --dataset digits --model cnn --batch-size 64 --epochs 5
"""
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.contender import Pictures, make_parser, time_epochs  # noqa: E402
from common import datasets, launch, models  # noqa: E402


def main(args):
    # without cpu=True, and no accelerator, each process would train a model of its own, in silence
    accelerator = Accelerator(cpu=args.device == "cpu" or not torch.accelerator.is_available())
    torch.set_num_threads(launch.cores_per_process())  # after Accelerator(), which counts them otherwise
    torch.manual_seed(0)
    source, _ = datasets.create_datasets(args.dataset, args.data_path, 0, ".")
    loader = DataLoader(Pictures(source), args.batch_size // accelerator.num_processes, shuffle=True, drop_last=True)
    model = models.create_model(args.model, source.num_classes, source.image_shape)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, weight_decay=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train_epoch(epoch):
        total_loss = 0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            total_loss += loss.item()

    time_epochs(args, len(loader), train_epoch, show=accelerator.is_main_process)
    accelerator.end_training()


if __name__ == "__main__":
    main(make_parser(__doc__).parse_args())
