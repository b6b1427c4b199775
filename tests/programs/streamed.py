"""Prints the pairs of each batch of loader_streaming.py, and resumes where a run was killed, as the file DONE says.

    PYTHONPATH=. python tests/programs/streamed.py DONE STOP [arguments of loader_streaming.py]

After STOP batches it waits to be killed. Pairs are known by their red level, as tests/test_loaders.py writes them.
"""
import signal
import sys
from pathlib import Path

import loader_streaming

if __name__ == "__main__":
    done, stop = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
    args = loader_streaming.parse_args()
    loader = loader_streaming.build_loader(args)
    skip = int(done.read_text()) if done.exists() else 0
    loader.set_epoch(1, skip)
    for number, (images, _) in enumerate(loader, 1):
        print("batch", *((images[:, 0, 0, 0] + 1) * 127.5).round().int().tolist(), flush=True)
        done.write_text(str(skip + number * args.batch_size))
        if number == stop:
            print("waiting", flush=True)
            signal.pause()
