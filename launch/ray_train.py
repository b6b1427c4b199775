"""Run train_DDP.py in the workers of Ray Train: a Ray cluster starts and restarts the processes.

    python launch/ray_train.py --num-workers 2 -- --epochs 5
    python launch/ray_train.py --max-failures 3 -- --dataset cifar100 --model resnet18 --resume auto

The arguments after `--` go to train_DDP.py. Ray replaces torchrun and join_group(): the group already exists when
a worker starts. All hosts of a cluster need this repository under the same path and must share --output-dir.
"""
import argparse
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import cli, devices, errors, launch, reduce  # noqa: E402, I001

import torch  # noqa: E402
import train_DDP  # noqa: E402


def parse_args():
    """Return this driver's arguments, and those of train_DDP.py."""
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--num-workers", type=cli.positive_int, help="number of processes (default: Ray's GPUs, or 2)")
    parser.add_argument("--max-failures", type=cli.count, default=0, help="how often to restart after a failure")
    driver, rest = parser.parse_known_args()
    sys.argv[1:] = [argument for argument in rest if argument != "--"]
    args = train_DDP.parse_args()
    if driver.max_failures and args.resume != "auto":
        raise errors.UsageError("--max-failures: every restart would lose all progress; add --resume auto after the --")
    for name in ("data_path", "output_dir", "weights", "resume"):  # workers have their own working directories
        path = getattr(args, name)
        if path and path != "auto":
            setattr(args, name, os.path.abspath(path))
    return driver, args


def worker(values):
    """In a worker, do what join_group() does except create the group, which already exists; then train."""
    args = argparse.Namespace(**values)
    args.device = str(devices.prepare(args.device, args.deterministic, int(os.environ["LOCAL_RANK"])))
    torch.set_num_threads(launch.cores_per_process())  # Ray gives each worker only one thread
    train_DDP.main(args)


def main():
    driver, args = parse_args()
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        raise errors.UsageError('Ray is not installed; pip install "ray[default,train]"') from None

    # Ray's controller also needs the path, to pass on workers' errors. The second variable prevents duplicate prints
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": path, "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    if args.deterministic:  # in the workers, NCCL has already started when devices.prepare() is called
        variables["NCCL_ALGO"] = "^NVLS"
    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(runtime_env={"env_vars": variables})
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler prints a stack and aborts

    have = ray.cluster_resources()
    use_gpu = have.get("GPU", 0) >= 1 and not str(args.device).startswith("cpu")
    kind = "GPU" if use_gpu else "CPU"
    count = driver.num_workers or (int(have["GPU"]) if use_gpu else 2)
    if count > have.get(kind, 0):  # otherwise, Ray would wait until there are enough
        raise errors.UsageError(f"--num-workers {count}: each needs one {kind}, but Ray has {have.get(kind, 0):g}")
    reduce.exact_share(args.batch_size, count)
    backend = reduce.choose_backend(args.backend, kind.replace("GPU", "cuda").lower()) if args.backend else None
    trainer = TorchTrainer(
        worker, train_loop_config=vars(args), torch_config=TorchConfig(backend=backend, timeout_s=args.timeout),
        scaling_config=ScalingConfig(num_workers=count, use_gpu=use_gpu),
        run_config=RunConfig(storage_path=os.path.join(args.output_dir, "ray"),
                             failure_config=FailureConfig(max_failures=driver.max_failures)))
    try:
        trainer.fit()
    except WorkerGroupError as error:
        # if one worker fails, the others lose their connection to it; their RuntimeError does not name the cause
        failures = error.worker_failures.items()
        rank, failure = min(failures, key=lambda item: isinstance(item[1], RuntimeError), default=(0, error))
        if not isinstance(failure, (errors.UsageError, errors.RunError)):
            failure = errors.RunError(f"rank {rank}: {str(failure).splitlines()[0]} (see the log above)")
        raise failure from None


if __name__ == "__main__":
    with cli.report_errors():
        main()
