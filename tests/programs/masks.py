"""A reader's own task for the scripts: a small U-Net, inside a wrapper, that finds rectangles in noisy images."""
import torch
from torch import nn


class Rectangles(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randint(100, (count, 3, 16, 24), dtype=torch.uint8, generator=generator)
        self.masks = torch.zeros(count, 16, 24, dtype=torch.int64)
        for image, mask, (top, left) in zip(self.images, self.masks, torch.randint(8, (count, 2), generator=generator)):
            mask[top:top + 8, left:left + 12] = 1
            image[:, mask.bool()] += 150

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


class Levels(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2))])
        self.up = nn.ModuleDict({"masks": nn.Conv2d(24, 2, 3, padding=1)})

    def forward(self, images):
        details = self.down[0](images)
        return self.up["masks"](torch.cat([details, self.down[1](details)], 1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.levels = Levels()

    def forward(self, images):
        if images.min() < 0 or images.max() > 1:
            raise ValueError("these are not the images of the dataset, scaled to [0, 1]")
        return self.levels(images)


def accuracy(outputs, masks):
    return (outputs.argmax(1) == masks).double().mean((1, 2))


def intersection(outputs, masks):
    return (outputs.argmax(1) & masks).sum((1, 2))


def union(outputs, masks):
    return (outputs.argmax(1) | masks).sum((1, 2))
