"""Read loader.py's pairs of images from tar shards in WebDataset's format, in a folder or over HTTP.

    pip install -r requirements/streaming.txt
    python -m common.pairs.tars --data-source DATA --split train --output SHARDS
    python loader_streaming.py --data-source SHARDS
    python loader_streaming.py --data-source https://HOST/SHARDS --workers 4
    python -m torch.distributed.launch --nproc_per_node=2 loader_streaming.py --data-source SHARDS

The second command writes the shards; without --data-source, the script creates samples. Each worker reads
one contiguous part of the shards, so write several shards per worker. In "train", each epoch shuffles the
shards, and a buffer shuffles the pairs. The batches depend on the numbers of processes and workers. To
resume within an epoch, use the same numbers, batch size, buffer and seed.

Parent: loader.py
"""
import os
import time

from common import cli, devices, errors, launch, loading, reduce
from common.pairs import pairs

# new # streaming
import random
from common.pairs import tars

import torch
import torch.distributed as dist

# new # streaming
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchvision.transforms.v2 import functional as transforms
from tqdm import tqdm


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    # new # streaming
    parser.add_argument("--data-source", metavar="SHARDS", help="folder or URL (default: a sample set)")
    parser.add_argument("--shuffle-buffer", type=cli.positive_int, default=200, help="pairs per worker")

    parser.add_argument("--split", choices=["train", "test"], default="train", help="what to read")

    # new # streaming: the names of the two files of a pair
    parser.add_argument("--img-dir", default="img", help="input images in the shards: KEY.img.*")
    parser.add_argument("--gt-dir", default="gt", help="target images in the shards: KEY.gt.*")

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


# new # streaming: no Rest: the stream itself leaves out the first pairs


class PairDataset:
    """Pairs, decoded and cropped on access. A batch is (its slot in `self.ring`, its number of pairs)."""

    def __init__(self, pair_list, cuts):
        self.pair_list, self.cuts, self.ring = pair_list, cuts, None
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # so that workers see each new epoch

    # new # streaming: a stream has neither a length nor access by index

    def _read(self, index):
        # new # streaming
        pair, crop = self.held.pop(index), self.cuts.crop
        paths = [path for path, _ in pair]
        decoded = [pairs.decode_reduced(path, self.cuts.resize, content) for path, content in pair]

        # Both images of a pair share one random crop
        images, sizes = zip(*decoded, strict=True)
        cut = self.cuts.choose(int(self.epoch), index, paths, sizes)
        images = [transforms.resize(image, cut.size, antialias=True) for image in images]
        images = [transforms.crop(image, cut.top, cut.left, crop, crop) for image in images]
        axes = [axis for axis, flip in ((1, cut.vertical_flip), (2, cut.horizontal_flip)) if flip]
        return [image.flip(axes) for image in images] if axes else images


# new # streaming: each worker reads a part of its process's share in sequence, and makes whole batches
class Stream(PairDataset, IterableDataset):
    """The pairs of one process: a range of positions in the list of shards, which each epoch shuffles."""

    def __init__(self, pair_list, cuts, share, batch_size):
        super().__init__(pair_list, cuts)
        self.share, self.batch_size, self.held = share, batch_size, {}
        self.skip = torch.zeros((), dtype=torch.int64).share_memory_()  # in batches

    def __iter__(self):
        shards, order = self._plan(int(self.epoch), int(self.skip))
        wanted = set(order)
        first, stop = min(order, default=0), max(order, default=-1) + 1
        stream = zip(range(first, stop), self.pair_list.read(shards, first, stop))
        self.held.clear()
        for begin in range(0, len(order), self.batch_size):
            places = order[begin:begin + self.batch_size]
            slot, batch = self.ring.take(len(places))
            for number, place in enumerate(places):
                while place not in self.held:
                    found, pair = next(stream)
                    if found in wanted:
                        self.held[found] = pair
                batch[0, number], batch[1, number] = self._read(place)
            yield slot, len(places)

    def _plan(self, epoch, skip):
        """Return the shards in this epoch's order, and the positions of the pairs that this worker reads."""
        worker = get_worker_info()
        worker, workers = (worker.id, worker.num_workers) if worker else (0, 1)

        # Workers deliver batches in turn. In a resumed run, worker 0 again delivers the first batch
        turn = (skip + worker) % workers
        batches = -(-len(self.share) // self.batch_size)
        counts = [len(range((batches + part) % workers, batches, workers)) for part in range(workers)]

        # The last part contains the last batch, which may be smaller
        part = (turn - batches) % workers
        places = self.share[sum(counts[:part]) * self.batch_size:][:counts[part] * self.batch_size]
        shards, order = list(self.pair_list.shards), list(places)
        if self.cuts.train:
            seed = f"shards {self.cuts.seed} {epoch}"  # all processes and workers need the same order
            random.Random(seed).shuffle(shards)
            order = buffered(places, self.pair_list.buffer, f"{seed} {places.start}")
        return shards, order[len(range(turn, skip, workers)) * self.batch_size:]


# new # streaming: simulate the buffer, so that a resumed run knows which pairs were delivered
def buffered(places, size, seed):
    """Return the positions in the order in which a shuffle buffer of `size` pairs returns them."""
    draw, buffer, order = random.Random(seed), [], []
    for place in places:
        if len(buffer) < size:
            buffer.append(place)
            continue
        drawn = draw.randrange(size)
        order.append(buffer[drawn])
        buffer[drawn] = place
    draw.shuffle(buffer)
    return order + buffer


class PairLoader:
    """Batches `(inputs, targets)` on `device`: float32 (N, 3, crop, crop), contiguous, from -1 to 1.

    Each pass over the loader is one epoch, with its own order and crops.
    """

    def __init__(self, pair_list, cuts, sampler, batch_size, workers, device):
        self.sampler, self.device, self.epoch, self.skip = sampler, device, 1, 0

        # new # streaming
        self.batch_size = batch_size
        self.dataset = Stream(pair_list, cuts, sampler, batch_size)
        options = loading.options(workers, device, self.dataset)

        self.dataset.ring = pairs.Ring(options["num_workers"], batch_size, cuts.crop)

        # new # streaming: the dataset makes the batches
        self.loader = DataLoader(self.dataset, batch_size=None, **options)

    def __len__(self):
        # new # streaming
        return -(-len(self.sampler) // self.batch_size)

    def set_epoch(self, epoch, skip=0):
        """Set the epoch of the next pass, to resume a run; later passes continue from there.

        The next pass skips `skip` pairs (whole batches, over all processes) without decoding them.
        """
        self.epoch, self.skip = epoch, pairs.whole_batches(skip, self.batch_size)

    def __iter__(self):
        epoch, self.epoch = self.epoch, self.epoch + 1
        skip, self.skip = self.skip, 0

        # new # streaming
        self.dataset.skip.fill_(skip)

        # new # streaming: no sampler

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

    # new # streaming: read only the list of shards
    names = args.img_dir, args.gt_dir
    pair_list = tars.Shards(args.data_source, args.split, names, args.shuffle_buffer)

    cuts = pairs.Cuts(args.resize, args.crop, args.seed, train=args.split == "train")
    if cuts.train and args.batch_size > len(pair_list):
        raise errors.UsageError(f"--batch-size {args.batch_size}: there are only {len(pair_list)} pairs")

    # Each process reads its share; for "test", DistributedSampler would pad with repeated pairs
    rank, world_size = reduce.get_rank(), reduce.get_world_size()
    batch_size = reduce.exact_share(args.batch_size, world_size)

    # new # streaming: a contiguous share lies in few shards; in "train", all shares have the same length
    size = len(pair_list) // args.batch_size * batch_size
    sampler = range(rank * size, (rank + 1) * size)
    if not cuts.train:
        first, stop = (-(-len(pair_list) * end // world_size) for end in (rank, rank + 1))
        sampler = range(first, stop)

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
