"""What the contenders of floor.py share: their arguments, the usual data, the line of an epoch."""
import argparse
import time

from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms

from common import datasets, models


class Pictures(Dataset):
    """The data as most published examples read it: one PIL image at a time, through torchvision's transforms."""

    def __init__(self, source):
        self.images = source.images.permute(0, 2, 3, 1).squeeze(-1).contiguous().numpy()
        self.labels = source.labels.tolist()
        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if source.augment else []
        self.transform = transforms.Compose([*steps, transforms.ToTensor(),
                                             transforms.Normalize(source.mean, source.std)])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def make_parser(doc):
    """Return a parser of the arguments that every contender takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=datasets.DATASETS, default="digits")
    parser.add_argument("--data-path", default="data")
    parser.add_argument("--model", choices=models.MODELS, default="cnn")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device")
    return parser


def time_epochs(args, steps, train_epoch, show=True):
    """Call `train_epoch(epoch)` for each epoch of so many `steps`; with `show` print its images/s as the scripts do."""
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        train_epoch(epoch)
        seconds = time.perf_counter() - start
        if show:
            speed = steps * args.batch_size / seconds
            print(f"epoch {epoch:3}/{args.epochs}  {seconds:.3f} s  {speed:,.0f} images/s")
