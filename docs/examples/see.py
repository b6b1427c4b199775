"""See the ideas of how-it-works.md happen, each in some seconds, on a CPU.

    python docs/examples/see.py               # all of them
    python docs/examples/see.py ring          # one: traffic, ring, average, batchnorm, half, accumulate or shares
"""
import contextlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def in_processes(count, work):
    """Run `work(rank, count)` in `count` processes that form a group."""
    with tempfile.TemporaryDirectory() as folder:
        method = "fork" if sys.platform == "linux" else "spawn"
        arguments = count, f"file://{folder}/store", work.__name__
        mp.start_processes(_member, arguments, count, start_method=method)


def _member(rank, count, store, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=count)
    globals()[name](rank, count)
    dist.destroy_process_group()


def traffic():
    """What one step sends, for a ResNet-18 of 11.2 million float32 parameters (a sum, not a measurement)."""
    model = 11_181_642 * 4 / 1e6
    print("devices   in all, either way   DataParallel: to and from device 0   DDP: from each device")
    for count in (2, 4, 8, 64):
        everything = 2 * (count - 1) * model
        print(f"{count:7} {everything:15,.0f} MB {everything:28,.0f} MB {everything / count:25,.0f} MB")


def ring():
    """All-reduce in a ring, by hand: 4 processes, 4 MB of gradients: who sends how much?"""
    in_processes(4, ring_of)


def ring_of(rank, count):
    gradients = torch.full((1_000_000,), float(rank + 1))
    expected = gradients.clone()
    dist.all_reduce(expected)
    chunks, sent = list(gradients.chunk(count)), 0
    for lap in ("add", "copy"):
        for step in range(count - 1):
            outgoing = chunks[(rank - step + (lap == "copy")) % count]
            arriving = (rank - step - 1 + (lap == "copy")) % count
            received = torch.empty_like(chunks[arriving])
            request = dist.isend(outgoing, (rank + 1) % count)
            dist.recv(received, (rank - 1) % count)
            request.wait()
            sent += outgoing.nbytes
            chunks[arriving].copy_(chunks[arriving] + received if lap == "add" else received)
    share, right = sent / gradients.nbytes, torch.equal(gradients, expected)
    in_turn(rank, count, f"rank {rank} sent {sent / 1e6:.1f} MB, {share:.2f} times its gradients; "
                         f"the sum is right: {right}")


def average():
    """Gradients: the mean over 4 processes of 16 samples each, and the gradient of all 64 on one."""
    in_processes(4, average_of)


def average_of(rank, count):
    torch.manual_seed(0)
    model, images, labels = nn.Linear(20, 5), torch.randn(64, 20), torch.randint(5, (64,))
    parallel_model = DistributedDataParallel(model)
    nn.functional.cross_entropy(parallel_model(images[rank::count]), labels[rank::count]).backward()
    averaged = model.weight.grad.clone()
    whole, = torch.autograd.grad(nn.functional.cross_entropy(model(images), labels), model.weight)
    if rank == 0:
        difference = (averaged - whole).abs().max().item()
        print(f"largest gradient {whole.abs().max():.4f}, largest difference {difference:.1e}")


def batchnorm():
    """BatchNorm: the mean that 4 processes of 8 samples each normalise by, and the one over all 32."""
    torch.manual_seed(0)
    samples = 3 + 2 * torch.randn(32, 1)
    shares = {f"process {rank} alone": samples[rank::4] for rank in range(4)}
    for name, share in [*shares.items(), ("over all (SyncBN)", samples)]:
        print(f"{name:20} mean {share.mean():.2f}   deviation {share.std(correction=0):.2f}")


def half():
    """Half precision: what becomes of small, large and nearly equal numbers."""
    print(f"{'':22} {'float16':>12} {'bfloat16':>12}")
    numbers = {"1e-8, a gradient": 1e-8, "1e-8 x 65536": 1e-8 * 65536, "70000": 70_000.0,
               "1 + 1/256": 1 + 1 / 256}
    for what, value in numbers.items():
        low, brain = torch.tensor(value).half().item(), torch.tensor(value).bfloat16().item()
        print(f"{what:22} {low:12.8g} {brain:12.8g}")


def accumulate():
    """Accumulation: how often 2 processes send their gradients in a step of 4 micro-batches."""
    in_processes(2, accumulate_in)


def accumulate_in(rank, count):
    model = nn.Linear(1000, 100)
    parallel_model = DistributedDataParallel(model)
    sent = []

    def send(_, bucket):
        sent.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer() / count, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    parallel_model.register_comm_hook(None, send)
    for careful in (False, True):
        sent.clear()
        for micro_batch in range(4):
            with parallel_model.no_sync() if careful and micro_batch < 3 else contextlib.nullcontext():
                parallel_model(torch.randn(8, 1000)).sum().backward()
        if rank == 0:
            name = "with no_sync()" if careful else "without no_sync()"
            print(f"{name:18} all-reduces: {len(sent)}, together {sum(sent) / 1e6:.1f} MB")


def shares():
    """Samples: what DistributedSampler gives 4 processes of 10 samples, and what range() gives."""
    for name, options in [("padded", {}), ("drop_last", {"drop_last": True})]:
        dealt = [list(DistributedSampler(range(10), 4, rank, shuffle=False, **options)) for rank in range(4)]
        print(f"{name:10} {dealt}")
    print(f"{'range':10} {[list(range(rank, 10, 4)) for rank in range(4)]}")


def in_turn(rank, count, line):
    """Print a line per process, in the order of their ranks."""
    for turn in range(count):
        if turn == rank:
            print(line, flush=True)
        dist.barrier()


def main():
    ideas = [traffic, ring, average, batchnorm, half, accumulate, shares]
    chosen = [idea for idea in ideas if idea.__name__ in sys.argv[1:] or len(sys.argv) == 1]
    if not chosen:
        sys.exit(__doc__.strip())
    for idea in chosen:
        print(f"{idea.__name__}: {idea.__doc__}", flush=True)
        idea()
        print(flush=True)


if __name__ == "__main__":
    main()
