"""Read pairs of images (a blurry photo and its sharp original) with torch's DataLoader.

    python loader.py
    python loader.py --data-source DATA --split test --workers 4 --preview pairs.png
    python -m torch.distributed.launch --nproc_per_node=2 loader.py --data-source DATA --batch-size 16

DATA contains {train,test}/{img,gt}/SUBDIR/NAME.jpg|png|webp; by default, the script creates samples in
./data. If --resize makes a JPEG at least four times smaller, the script decodes it at 1/2, 1/4 or 1/8 scale.
In photos, pixels then differ from those of a full decode by at most 12 (of 255), and by less than 2
on average.

In a training script, call build_loader after init_process_group:

    loader = build_loader(args)
    for epoch in range(1, args.epochs + 1):
        for inputs, targets in loader:

Parent: none
"""
import os
import time

from common import cli, devices, errors, launch, loading, reduce
from common.pairs import pairs

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.transforms.v2 import functional as transforms
from tqdm import tqdm


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--data-source", metavar="DATA", help="folder of the pairs (default: a sample set)")
    parser.add_argument("--split", choices=["train", "test"], default="train", help="what to read")
    parser.add_argument("--img-dir", default="img", help="folder of input images in each split")
    parser.add_argument("--gt-dir", default="gt", help="the folder of target images")
    parser.add_argument("--resize", type=cli.count, default=256, help="shorter side in pixels; 0: no resize")
    parser.add_argument("--crop", type=cli.positive_int, default=224, help="side length in pixels")
    parser.add_argument("--batch-size", type=cli.positive_int, default=8, help="samples over ALL processes")
    parser.add_argument("--workers", type=cli.count, help="reader processes (default: depends on cores)")
    parser.add_argument("--epochs", type=cli.positive_int, default=2, help="passes over the pairs")
    parser.add_argument("--seed", type=cli.count, default=1234, help="for order, crops and flips")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, xpu, mps (default: an accelerator, else cpu)")
    parser.add_argument("--preview", metavar="PNG", help="save the first pairs to this file")
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help="set by old launchers")
    return parser.parse_args()


class Rest:
    """The given sampler without its first `first` indices; the length is still that of a full pass."""

    def __init__(self, sampler):
        self.sampler, self.first = sampler, 0

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        return iter([*self.sampler][self.first:])


class PairDataset:
    """Pairs, decoded and cropped on access. A batch is (its slot in `self.ring`, its number of pairs)."""

    def __init__(self, pair_list, cuts):
        self.pair_list, self.cuts, self.ring = pair_list, cuts, None
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # so that workers see each new epoch

    def __len__(self):
        return len(self.pair_list)

    def __getitems__(self, indices):
        slot, batch = self.ring.take(len(indices))
        for place, index in enumerate(indices):
            batch[0, place], batch[1, place] = self._read(index)
        return slot, len(indices)

    def _read(self, index):
        paths, crop = self.pair_list[index], self.cuts.crop
        decoded = [pairs.decode_reduced(path, self.cuts.resize) for path in paths]

        # Both images of a pair share one random crop
        images, sizes = zip(*decoded, strict=True)
        cut = self.cuts.choose(int(self.epoch), index, paths, sizes)
        images = [transforms.resize(image, cut.size, antialias=True) for image in images]
        images = [transforms.crop(image, cut.top, cut.left, crop, crop) for image in images]
        axes = [axis for axis, flip in ((1, cut.vertical_flip), (2, cut.horizontal_flip)) if flip]
        return [image.flip(axes) for image in images] if axes else images


class PairLoader:
    """Batches `(inputs, targets)` on `device`: float32 (N, 3, crop, crop), contiguous, from -1 to 1.

    Each pass over the loader is one epoch, with its own order and crops.
    """

    def __init__(self, pair_list, cuts, sampler, batch_size, workers, device):
        self.sampler, self.device, self.epoch, self.skip = sampler, device, 1, 0
        self.batch_size, self.rest = batch_size, Rest(sampler)
        self.dataset = PairDataset(pair_list, cuts)
        options = loading.options(workers, device, self.dataset) | {"drop_last": cuts.train}
        self.dataset.ring = pairs.Ring(options["num_workers"], batch_size, cuts.crop)
        self.loader = DataLoader(self.dataset, batch_size, sampler=self.rest, **options)

    def __len__(self):
        return len(self.loader)

    def set_epoch(self, epoch, skip=0):
        """Set the epoch of the next pass, to resume a run; later passes continue from there.

        The next pass skips `skip` pairs (whole batches, over all processes) without decoding them.
        """
        self.epoch, self.skip = epoch, pairs.whole_batches(skip, self.batch_size)

    def __iter__(self):
        epoch, self.epoch = self.epoch, self.epoch + 1
        skip, self.skip = self.skip, 0
        self.rest.first = skip * self.batch_size
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)
        self.dataset.epoch.fill_(epoch)
        for slot, count in self.loader:
            batch = self.dataset.ring.slots[slot, :, :count]
            if self.loader.pin_memory:  # a worker may overwrite the slot during the transfer
                batch = batch.pin_memory()
            # Transfer uint8: a quarter of the bytes of float32
            batch = batch.to(self.device, non_blocking=self.loader.pin_memory)
            inputs, targets = (part.float().sub_(127.5).div_(127.5) for part in batch)
            yield inputs, targets


def build_loader(args):
    """Return this process's share of the pairs: a sized iterable of batches `(inputs, targets)`.

    "train" shuffles each epoch and drops the incomplete last batch. In "test", exactly one process reads
    each pair, and the last batch may be smaller. Raises UsageError for mismatched pairs, and ProcessError
    for a file that cannot be read.
    """
    device = devices.select_device(args.device)
    devices.keep_freed_memory(device)
    pair_list = pairs.find_pairs(args.data_source, args.split, args.img_dir, args.gt_dir)
    cuts = pairs.Cuts(args.resize, args.crop, args.seed, train=args.split == "train")
    if cuts.train and args.batch_size > len(pair_list):
        raise errors.UsageError(f"--batch-size {args.batch_size}: there are only {len(pair_list)} pairs")

    # Each process reads its share; for "test", DistributedSampler would pad with repeated pairs
    rank, world_size = reduce.get_rank(), reduce.get_world_size()
    batch_size = reduce.exact_share(args.batch_size, world_size)
    if cuts.train:
        seed = loading.seed(args.seed)
        sampler = DistributedSampler(pair_list, world_size, rank, seed=seed, drop_last=True)
    else:
        sampler = range(rank, len(pair_list), world_size)
    return PairLoader(pair_list, cuts, sampler, batch_size, args.workers, device)


def main(args):
    loader = build_loader(args)
    for epoch in range(1, args.epochs + 1):
        count, waited, first_wait = 0, 0.0, 0.0
        start = asked = time.perf_counter()
        bar = tqdm(loader, f"epoch {epoch}", leave=False, disable=not reduce.is_main_process() or None)
        for inputs, targets in bar:
            if inputs.device.type != "cpu":
                torch.accelerator.synchronize()
            wait = time.perf_counter() - asked
            waited += wait
            first_wait = first_wait or wait

            # Your training step goes here
            if args.preview and reduce.is_main_process() and epoch == 1 and not count:
                pairs.save_preview(args.preview, inputs, targets)

            count += len(inputs)
            asked = time.perf_counter()

        # The sum over all processes waits for the slowest process
        count = reduce.reduce_sum(torch.tensor(count, device=args.device)).item()
        seconds = time.perf_counter() - start
        if not reduce.is_main_process():
            continue
        print(f"epoch {epoch:3}/{args.epochs}  {count} pairs  {len(loader)} batches  {seconds:.2f} s  "
              f"{count / seconds:,.0f} pairs/s  first batch {first_wait:.3f} s  "
              f"waiting {100 * waited / seconds:.0f} % of the time")


def join_group(args):
    # torchrun and torch.distributed.launch set these variables; srun and plain python need this line
    os.environ.update(launch.launch_environment())
    local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))

    # Set the device first, or every process creates a context on device 0
    args.device = str(devices.select_device(args.device, local_rank))
    torch.set_num_threads(launch.cores_per_process())
    backend = reduce.choose_backend(None, args.device)
    device_id = torch.device(args.device) if backend == "nccl" else None
    dist.init_process_group(backend, device_id=device_id)


if __name__ == "__main__":
    with cli.report_errors():
        args = parse_args()
        join_group(args)
        main(args)

        # Only after success: after a failure, this could wait forever for other ranks
        dist.destroy_process_group()
