"""A program that hangs, for docs/hangs.md: rank 0 validates alone, and validation has a collective.

    torchrun --nproc-per-node=2 docs/examples/hang.py
    torchrun --nproc-per-node=2 docs/examples/hang.py --stuck        # rank 1 waits for data, in no collective
"""
import argparse
import json
import queue
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist


def say(line):
    sys.stdout.write(f"rank {dist.get_rank()}: {line}\n")
    sys.stdout.flush()


def train_step():
    gradient = torch.ones(1000)
    dist.all_reduce(gradient)


def validate():
    loss = torch.rand(())
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def next_batch():
    return queue.Queue().get()  # no batch ever arrives


def show_record():
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
    for entry in entries[-2:]:
        say(f"{entry['collective_seq_id']} {entry['profiling_name']} {entry['input_sizes']}")


def main(args):
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    for _ in range(3):
        train_step()
    say("3 steps are done")

    if args.record:
        threading.Timer(args.record, show_record).start()
    if args.stuck and rank == 1:
        next_batch()
    if rank == 0:  # the mistake: rank 1 does not enter the collective in validate()
        validate()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stuck", action="store_true", help="rank 1 waits for data, in no collective")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a collective may take")
    parser.add_argument("--record", type=float, metavar="SECONDS", help="then show the flight recorder's last entries")
    main(parser.parse_args())
