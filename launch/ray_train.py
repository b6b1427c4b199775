"""Run train_DDP.py in the workers of Ray Train: a Ray cluster starts the processes, and starts them again.

    python launch/ray_train.py --num-workers 2 -- --epochs 5
    python launch/ray_train.py --max-failures 3 -- --dataset cifar100 --model resnet18 --resume auto

What follows `--` is for train_DDP.py. Ray takes the place of torchrun and of join_group(): it has started the group
when a worker begins. On a cluster of several hosts each needs this repository under the same path, and --output-dir
has to be a folder that all of them see.
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
    """Return this driver's arguments and train_DDP.py's, which takes those that are not known here."""
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--num-workers", type=cli.positive_int, help="processes (default: Ray's GPUs, 2 without any)")
    parser.add_argument("--max-failures", type=cli.count, default=0, help="how often to start again after a failure")
    driver, rest = parser.parse_known_args()
    sys.argv[1:] = [argument for argument in rest if argument != "--"]
    args = train_DDP.parse_args()
    if driver.max_failures and args.resume != "auto":
        raise errors.UsageError("--max-failures: every start would begin anew; add --resume auto after the --")
    for name in ("data_path", "output_dir", "weights", "resume"):  # a worker has a working directory of its own
        path = getattr(args, name)
        if path and path != "auto":
            setattr(args, name, os.path.abspath(path))
    return driver, args


def worker(values):
    """Do in a worker what join_group() does, but for the group, which is there; then train."""
    args = argparse.Namespace(**values)
    args.device = str(devices.select_device(args.device, int(os.environ["LOCAL_RANK"])))
    torch.set_num_threads(launch.cores_per_process())  # Ray leaves each worker one thread, on however many cores
    train_DDP.main(args)


def main():
    driver, args = parse_args()
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        raise errors.UsageError('Ray is not installed; pip install "ray[default,train]"') from None

    # the path is for Ray's controller, too: it hands on what a worker raises. Without the last, all prints come twice.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path, "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}})
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own prints a stack and aborts

    have = ray.cluster_resources()
    use_gpu = have.get("GPU", 0) >= 1 and not str(args.device).startswith("cpu")
    kind = "GPU" if use_gpu else "CPU"
    count = driver.num_workers or (int(have["GPU"]) if use_gpu else 2)
    if count > have.get(kind, 0):  # Ray would wait for more to come
        raise errors.UsageError(f"--num-workers {count}: one {kind} each, and Ray has {have.get(kind, 0):g}")
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
        # where one fails, the others lose their connection to it, a RuntimeError, which says less
        failures = error.worker_failures.items()
        rank, failure = min(failures, key=lambda item: isinstance(item[1], RuntimeError), default=(0, error))
        if not isinstance(failure, (errors.UsageError, errors.RunError)):
            failure = errors.RunError(f"rank {rank}: {str(failure).splitlines()[0]} (more of it above)")
        raise failure from None


if __name__ == "__main__":
    with errors.report_errors():
        main()
