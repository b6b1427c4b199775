"""Read loader.py's pairs of images with NVIDIA DALI, which decodes on a GPU if there is one.

    pip install -r requirements/dali.txt
    python loader_DALI.py
    python loader_DALI.py --data-source DATA --split test --workers 4 --preview pairs.png
    python -m torch.distributed.launch --nproc_per_node=2 loader_DALI.py --data-source DATA --batch-size 16

Pairs, order, crops and flips are the same as in loader.py. DALI decodes only the region of the crop, at full
scale. On a CPU, most pixels differ from loader.py's by at most 1 (of 255). The difference is up to 12 in the
outermost rows and columns of a crop, and in photos that loader.py decodes at a reduced scale.

Parent: loader.py
"""
import os
import time

from common import cli, devices, errors, launch, loading, reduce
from common.pairs import pairs

# new # DALI
import numpy as np

import torch
import torch.distributed as dist

# new # DALI
from torch.utils.data import DistributedSampler

# new # DALI: no torchvision.transforms: DALI resizes, crops and flips

from tqdm import tqdm

# new # DALI: an optional dependency
try:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
except ImportError as error:
    if __name__ != "__main__":
        raise
    with cli.report_errors():
        raise errors.UsageError(f"no NVIDIA DALI ({error}): pip install -r requirements/dali.txt") from None


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


# new # DALI: DALI requests batches by number, so workers can prepare them in any order
class PairSource:
    """Returns one batch of this process's pairs per call: encoded files, and the position of each crop.

    StopIteration ends an epoch. Each epoch has its own order and crops.
    """

    def __init__(self, pair_list, cuts, sampler, batch_size, batches, first_epoch, skip):
        self.pair_list, self.cuts, self.sampler = pair_list, cuts, sampler
        self.batch_size, self.batches, self.first_epoch = batch_size, batches, first_epoch
        self.skip = skip  # in batches; applies only to the first epoch
        self.order = None

    def __call__(self, info):
        iteration = info.iteration + (0 if info.epoch_idx else self.skip)
        if iteration >= self.batches:
            raise StopIteration
        epoch = self.first_epoch + info.epoch_idx
        samples = [self.read(epoch, index) for index in self.indices(epoch, iteration)]
        return [list(column) for column in zip(*samples, strict=True)]

    def indices(self, epoch, iteration):
        """Return the indices of the pairs in a batch."""
        if self.order is None or self.order[0] != epoch:
            if isinstance(self.sampler, DistributedSampler):
                self.sampler.set_epoch(epoch)
            self.order = epoch, list(self.sampler)
        return self.order[1][iteration * self.batch_size:][:self.batch_size]

    def read(self, epoch, index):
        """Return two encoded files, the region to decode, and the crop relative to the region."""
        paths = self.pair_list[index]
        files, sizes = zip(*map(pairs.read_encoded, paths), strict=True)
        cut = self.cuts.choose(epoch, index, paths, sizes)

        # Coordinates are (y, x); the crop has fractional coordinates in the original image
        size, scale = np.array(sizes[0]), np.array(sizes[0]) / cut.size
        start = np.array([cut.top, cut.left]) * scale
        end = start + self.cuts.crop * scale

        # The resize and the decoder's color upsampling also read pixels around the crop
        margin = np.ceil(scale) + 16
        low = np.maximum(start - margin, 0).astype(np.int32)
        high = np.minimum(end + margin, size).astype(np.int32)

        # DALI flips a window whose end precedes its start
        flips = [cut.vertical_flip, cut.horizontal_flip]
        start, end = np.where(flips, end, start) - low, np.where(flips, start, end) - low
        return *files, low, high, start.astype(np.float32), end.astype(np.float32)


# new # DALI: decode a region; resize, crop and flip in one step; normalize and change the layout
@pipeline_def
def pair_pipeline(source, crop, on_gpu, workers):
    options = {"parallel": True, "prefetch_queue_depth": workers} if workers else {}
    columns = fn.external_source(source, num_outputs=6, batch=True, batch_info=True, **options)
    *files, low, high, start, end = columns
    images = fn.decoders.image_slice(files, start=low, end=high, axes=[0, 1], output_type=types.RGB,
                                     device="mixed" if on_gpu else "cpu")
    images = fn.resize(images, size=[crop, crop], roi_start=start, roi_end=end)
    return tuple(fn.crop_mirror_normalize(images, mean=127.5, std=127.5, output_layout="CHW"))


class PairLoader:
    """Batches `(inputs, targets)` on `device`: float32 (N, 3, crop, crop), contiguous, from -1 to 1.

    Each pass over the loader is one epoch, with its own order and crops.
    """

    def __init__(self, pair_list, cuts, sampler, batch_size, workers, device):
        self.sampler, self.device, self.epoch, self.skip = sampler, device, 1, 0

        # new # DALI: "train" drops the incomplete last batch; "test" keeps it
        self.pair_list, self.cuts = pair_list, cuts
        self.batch_size = batch_size
        self.workers = workers or 0
        self.batches = (len(sampler) if cuts.train else len(sampler) + batch_size - 1) // batch_size
        self.upcoming = None

    def __len__(self):
        # new # DALI
        return self.batches

    def set_epoch(self, epoch, skip=0):
        """Set the epoch of the next pass, to resume a run; later passes continue from there.

        The next pass skips `skip` pairs (whole batches, over all processes) without decoding them.
        """
        self.epoch, self.skip = epoch, pairs.whole_batches(skip, self.batch_size)

    def __iter__(self):
        epoch, self.epoch = self.epoch, self.epoch + 1
        skip, self.skip = self.skip, 0

        # new # DALI: the pipeline continues with the next epoch; restart it for any other position
        if not self.batches:
            return
        step = skip
        try:
            if self.upcoming != epoch or skip:
                self._start(epoch, skip)
            self.upcoming = None
            for [batch] in self.iterator:
                yield batch["inputs"].to(self.device), batch["targets"].to(self.device)
                step += 1
            self.upcoming = epoch + 1
        except Exception:
            self._blame(epoch, step)
            raise

    # new # DALI
    def _start(self, epoch, skip):
        self.source = PairSource(self.pair_list, self.cuts, self.sampler, self.batch_size, self.batches,
                                 epoch, skip)
        on_gpu, index = self.device.type == "cuda", self.device.index
        options = {"batch_size": self.batch_size, "num_threads": launch.cores_per_process(),
                   "device_id": torch.cuda.current_device() if on_gpu and index is None else index,
                   "py_num_workers": self.workers, "py_start_method": "spawn" if on_gpu else "fork"}
        pipeline = pair_pipeline(self.source, self.cuts.crop, on_gpu, self.workers, **options)
        self.iterator = DALIGenericIterator([pipeline], ["inputs", "targets"], auto_reset=True,
                                            last_batch_policy=LastBatchPolicy.PARTIAL)

    # new # DALI: DALI's errors name no file, so decode the prefetched files to find the damaged one
    def _blame(self, epoch, step):
        for number in range(step, step + self.workers + 4):
            turns, iteration = divmod(number, self.batches)
            for index in self.source.indices(epoch + turns, iteration):
                self.source.read(epoch + turns, index)
                for path in self.pair_list[index]:
                    pairs.decode(path)


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
