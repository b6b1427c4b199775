"""The data as most published examples read it: each sample by itself, through PIL and torchvision's transforms."""
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms


class Pictures(Dataset):
    """The arrays of a set, one PIL image at a time, as torchvision's data sets hand them out."""

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
