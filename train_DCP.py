"""Save each process's shards of a model while training continues: distributed checkpoints.

    python -m torch.distributed.launch --nproc_per_node=2 train_DCP.py --resume auto
    torchrun --nproc-per-node=gpu train_DCP.py --dataset cifar100 --model vit_base --resume auto
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST1:29400 train_DCP.py
    srun --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --gpus-per-node=4 -K python train_DCP.py

Like train_elastic.py, this script also saves within an epoch, and on SIGTERM or SIGUSR1.

Parents: train_FSDP.py, train_elastic.py
"""
import time

# new # DDP
import os
from datetime import timedelta

# new # elastic
import sys
from itertools import islice

# new # DDP
from common import checkpoint, cli, datasets, devices, errors, launch, loading, models, recipe, reduce

# new # FSDP
from common import clipping, layers, replay, shards

# new # elastic
from common import signals

# new # DCP
from common import dcp_folders

import torch

# new # DDP
import torch.distributed as dist

# new # FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# new # DCP
import torch.distributed.checkpoint as dcp

from torch.utils.data import DataLoader, DistributedSampler

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

criterion = torch.nn.CrossEntropyLoss()  # yours: the loss, a mean over the samples
METRICS = {"accuracy": recipe.top(1), "top5": recipe.top(5)}  # yours: the metrics, one value per sample


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--dataset", choices=datasets.DATASETS, default="digits", help="the dataset")
    parser.add_argument("--data-path", default="data", help="data folder; downloads go there too")
    parser.add_argument("--model", choices=models.MODELS, default="cnn", help="the network")
    parser.add_argument("--weights", metavar="PATH", help="load the matching tensors from this file")
    parser.add_argument("--freeze-layers", action="store_true", help="train only the last layers")
    parser.add_argument("--epochs", type=cli.positive_int, default=10, help="passes over the training set")
    parser.add_argument("--batch-size", type=cli.positive_int, default=64, help="samples over ALL processes")
    parser.add_argument("--lr", type=cli.positive, default=0.05, help="for batch size 128; scales linearly")
    parser.add_argument("--lrf", type=cli.fraction, default=0.01, help="final rate as a fraction of --lr")
    parser.add_argument("--momentum", type=cli.fraction, default=0.9, help="momentum of SGD")
    parser.add_argument("--weight-decay", type=cli.not_negative, default=1e-4, help="skips biases and norms")
    parser.add_argument("--workers", type=cli.count, help="loader processes (default: set automatically)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, xpu, mps (default: an accelerator, else cpu)")
    parser.add_argument("--deterministic", action="store_true", help="make runs bit-identical; slower")
    parser.add_argument("--seed", type=cli.count, default=0, help="for weights, order and augmentation")
    parser.add_argument("--output-dir", default="runs", help="folder for checkpoints and TensorBoard")
    parser.add_argument("--resume", metavar="PATH", help="a checkpoint, or auto: last.pt in --output-dir")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the loaded weights")
    parser.add_argument("--log-every", type=cli.positive_int, default=10, help="read the loss every N steps")
    parser.add_argument("--save-every", type=cli.count, default=0, help="also keep every Nth checkpoint")

    # new # DDP: for models with BatchNorm
    parser.add_argument("--sync-bn", action="store_true", help="BatchNorm over all processes (GPU only)")

    # new # DDP
    parser.add_argument("--backend", help="nccl, gloo, ... (default: nccl on CUDA, gloo on CPU)")
    parser.add_argument("--timeout", type=cli.positive, default=600, help="seconds to wait for other ranks")

    # new # FSDP
    parser.add_argument("--replicas", type=cli.positive_int, default=1, help="copies of the sharded model")
    parser.add_argument("--reshard-after-forward", choices=["yes", "no"], default="yes", help="free weights")
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--clip-norm", type=cli.positive, help="maximum gradient norm (default: no limit)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, also in evaluation")
    parser.add_argument("--compile", action="store_true", help="compile each block of the model")

    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help="set by old launchers")

    # new # elastic
    parser.add_argument("--snapshot-every", type=cli.positive_int, default=100, help="save every N steps")

    return parser.parse_args()


# new # elastic: a sampler that keeps its order but can start mid-epoch
class ResumableSampler(DistributedSampler):
    first = 0

    def __iter__(self):
        return islice(super().__iter__(), self.first, None)


# new # DCP: copy the shards now, and write the copies while training continues; .metadata comes last
def save(folder, steps, state, group, stager, saving, **values):
    dcp_folders.wait(saving)
    dcp_folders.prune(folder)
    path, tensors = dcp_folders.create(folder, steps, state, **values)
    return dcp.async_save(tensors, checkpoint_id=path, process_group=group, async_stager=stager)


@torch.no_grad()
def evaluate(model, loader, normalize, device):
    """Return the mean loss and the mean of each metric over all samples; each sample counts once."""
    model.eval()
    sums = torch.zeros(2 + len(METRICS), device=device)

    # new # FSDP: all ranks run the same number of batches; padding samples come last and are not counted
    left = loader.sampler.own

    for batch in loader:
        inputs, targets = (part.to(device, non_blocking=loader.pin_memory) for part in batch)
        outputs = model(normalize(inputs))

        # new # FSDP
        if left <= 0:
            continue
        outputs, targets, left = outputs[:left], targets[:left], left - len(targets)

        values = recipe.sum_metrics(METRICS, outputs, targets)
        sums[:-1] += torch.stack([criterion(outputs, targets) * len(targets), *values])
        sums[-1] += len(targets)

    # new # DDP: sums over all processes are exact; a mean of means is not
    dist.all_reduce(sums)

    loss, *totals, count = sums.tolist()
    metrics = {name: total / count for name, total in zip(METRICS, totals)}
    # yours: the ratios of these means, such as an IoU; pop the means that you do not want to print
    return loss / count, metrics


def start_log(args, start_epoch, headline):
    """Print the headline, log the arguments to TensorBoard, and return the writer."""
    print(headline)
    writer = SummaryWriter(args.output_dir, purge_step=start_epoch)
    writer.add_text("arguments", "\n".join(f"    {name} = {value}" for name, value in vars(args).items()))
    writer.flush()
    return writer


def main(args):
    torch.manual_seed(args.seed)
    device = devices.prepare(args.device, args.deterministic)
    folder = checkpoint.make_folder(args.output_dir, lock=not args.evaluate)

    # new # elastic: a signal sets a flag; the loop stops once all processes know about the signal
    stop = signals.note_signals("SIGTERM", "SIGUSR1")

    # new # DCP: elastic: a separate CPU group keeps the messages of saving apart from those of training
    cpu_group, stager, saving = dist.new_group(backend="gloo"), dcp_folders.create_stager(device.type), None

    # yours: the data; every epoch shuffles the samples again and drops its incomplete last batch
    train_set, val_set = datasets.create_datasets(args.dataset, args.data_path, args.seed)
    datasets.require_samples(train_set, val_set, args.batch_size)

    # new # DDP: each process reads its share of each batch, in train.py's order
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_batch_size = reduce.exact_share(args.batch_size, world_size)

    # new # elastic
    sampler = ResumableSampler(train_set, seed=loading.seed(args.seed), drop_last=True)

    train_options = loading.options(args.workers, device, train_set)
    val_options = loading.options(args.workers, device, val_set)

    # new # elastic: loader workers ignore the signals of Slurm or a launcher; this process handles them
    train_options["worker_init_fn"] = val_options["worker_init_fn"] = signals.shield_worker

    train_loader = DataLoader(train_set, local_batch_size, sampler=sampler, drop_last=True, **train_options)

    # new # FSDP: each forward pass gathers weights, so every rank must take part in it
    val_share = shards.EvenShare(len(val_set), rank, world_size)

    val_loader = DataLoader(val_set, local_batch_size, sampler=val_share, **val_options)

    normalize = datasets.Normalize(train_set).to(device)

    # yours: the model
    # new # FSDP: create tensors without data; later, each process draws all weights and keeps its shards
    model, weights = replay.outline(models.create_model, args.model, *datasets.classes_and_shape(train_set))

    # new # DDP: convert BatchNorm before freezing layers and before creating the optimizer
    model = models.sync_batchnorm(model, device) if args.sync_bn else model

    if args.weights:
        models.load_weights(model, args.weights)
    if args.freeze_layers:
        models.freeze_layers(model)

    # new # FSDP: shard each block, then the rest, before the optimizer gets the parameters
    mesh = dist.init_device_mesh(device.type, **shards.fsdp_mesh(args.replicas, device))
    half, single = (torch.bfloat16, torch.float32) if args.bf16 else (None, None)
    policy, root_policy = MixedPrecisionPolicy(half, single), MixedPrecisionPolicy(half, single, single)
    blocks = layers.blocks(model, args.activation_checkpointing, args.bf16)
    for block, reshard in shards.units(blocks, args.reshard_after_forward == "yes"):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    parallel_model = shards.sum_gradients(fully_shard(model, mesh=mesh, mp_policy=root_policy))

    # new # FSDP: now draw the weights and keep this process's shards; convolutions get channels-last inputs
    shards.fill(model, weights, device).register_forward_pre_hook(shards.channels_last)

    # new # FSDP: compile block by block, so that equal blocks compile once
    if args.compile:
        layers.compile_blocks(model)

    # yours: the optimizer; scale the learning rate linearly with the batch size only for SGD
    lr = args.lr * args.batch_size / 128
    optimizer = torch.optim.SGD(models.parameter_groups(model, args.weight_decay), lr, args.momentum)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.cosine(args.epochs, args.lrf))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    # new # elastic: the position within the epoch, if the checkpoint is a snapshot
    order = f"--batch-size {args.batch_size} --seed {args.seed}"
    progress = {"step": 0, "train_loss": 0.0, "order": order}

    # new # DCP: FSDP + elastic: resume from a file, or from a folder that any number of processes wrote
    start_epoch, best_score = dcp_folders.resume(args.resume, folder, state, progress, dcp.load)

    if progress["order"] != order:
        raise errors.UsageError(f"--resume: this epoch began with {progress['order']}; use it, not {order}")

    if args.evaluate:
        # new # elastic: a snapshot from the first epoch also counts as loaded weights
        if not args.weights and start_epoch == 1 and not progress["step"]:

            raise errors.UsageError("--evaluate: no weights were loaded; pass --weights or --resume")
        val_loss, metrics = evaluate(model, val_loader, normalize, device)

        # new # DDP
        if not reduce.is_main_process():
            return

        print(f"val_loss {val_loss:.4f}  {cli.show(metrics)}")
        return

    datasets.save_classes(train_set, folder)
    # new # DDP
    layout = f"{world_size} process(es) x 1 micro-batch x {local_batch_size}"

    headline = f"{device}: batch {args.batch_size} = {layout}, lr {lr:g}, {models.size(model)} parameters"

    # new # FSDP: a unit gathers all of its weights at once; a single unit would save no memory
    headline += f" in {shards.count_units(model)} FSDP units"

    # new # DDP: only one process writes the log
    writer = start_log(args, start_epoch, headline) if reduce.is_main_process() else None

    # new # DCP: reject folders that are newer than this run: prune() would delete this run's instead
    dcp_folders.reject_newer(folder, (start_epoch - 1) * len(train_loader) + progress["step"])

    for epoch in range(start_epoch, args.epochs + 1):  # yours: early stopping: break here, on all ranks
        # Order, augmentation and dropout depend only on (seed, epoch), so a resumed run reproduces them
        datasets.set_epoch(train_set, epoch)

        # new # DDP: the sampler shuffles by epoch; each process draws its own dropout masks
        sampler.set_epoch(epoch)
        torch.manual_seed(loading.seed(args.seed, epoch) + rank)

        # new # elastic: skip the finished steps of this epoch without reading their samples
        first_step, progress["step"] = progress["step"], 0
        step, train_loss = first_step, progress["train_loss"]
        sampler.first = first_step * local_batch_size

        model.train()

        # new # elastic: start from the sum of losses over the finished steps
        loss_sum = torch.full((), train_loss * first_step, device=device)

        start = time.perf_counter()

        # new # DDP: only one process shows a progress bar
        bar = tqdm(train_loader, f"epoch {epoch}", leave=False, disable=not reduce.is_main_process() or None)

        # new # elastic: steps count from the start of the epoch; dropout depends on the step
        bar.update(first_step)
        for step, batch in enumerate(bar, first_step + 1):
            torch.manual_seed(loading.seed(args.seed, epoch, step, rank))

            inputs, targets = (part.to(device, non_blocking=train_loader.pin_memory) for part in batch)
            optimizer.zero_grad()

            # new # DDP: call the wrapper: its forward prepares the gradient reduction
            loss = criterion(parallel_model(normalize(inputs)), targets)

            loss.backward()

            # new # FSDP: clip by the norm over all shards
            clipping.clip_grad_norm(model.parameters(), args.clip_norm)

            optimizer.step()
            # yours: a scheduler that steps after every batch; clip gradients above optimizer.step()
            loss_sum += loss.detach()

            # Reading the loss waits for the device: do it only every --log-every steps

            # new # elastic: also read the loss when a snapshot is due
            if step % args.log_every and step % args.snapshot_every and step < len(train_loader):

                continue

            # new # elastic: one reduction sums the loss and tells all processes about a signal
            sums = torch.stack([loss_sum, torch.full((), float(stop.is_set()), device=device)])
            loss_total, stopping = reduce.reduce_sum(sums).tolist()
            train_loss = loss_total / world_size / step

            errors.require_finite(train_loss, f"epoch {epoch}, step {step}: the loss")
            bar.set_postfix(loss=f"{train_loss:.4f}")

            # new # elastic: copy the weights now, and write the copy while training continues
            if stopping or step % args.snapshot_every == 0:
                norm = torch.nn.utils.get_total_norm(model.parameters()).item()
                errors.require_finite(norm, f"epoch {epoch}, step {step}: the norm of the weights")
                values = {"epoch": epoch - 1, "step": step, "train_loss": train_loss, "order": order}

                # new # DCP: elastic: save the shards in a folder named after the total number of steps
                done = (epoch - 1) * len(train_loader) + step
                values |= {"score": best_score, "best_score": best_score}
                saving = save(folder, done, state, cpu_group, stager, saving, **values)

            # new # elastic: wait for the save: if one rank exits, the launcher kills the rest
            if stopping:

                # new # DCP: elastic: every rank waits, because each writes a part
                dcp_folders.wait(saving)

                dist.barrier()
                if reduce.is_main_process():
                    print(f"epoch {epoch}, step {step}: stopped by a signal and saved; use --resume auto")
                return signals.stopped()

        seconds = time.perf_counter() - start

        # new # DDP: BatchNorm's statistics differ between processes: use rank 0's
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

        val_loss, metrics = evaluate(model, val_loader, normalize, device)
        errors.require_finite(val_loss, f"epoch {epoch}, step {step}: the validation loss")
        score = metrics["accuracy"]  # yours: the score; best.pt is the epoch with the highest score
        lr = optimizer.param_groups[0]["lr"]
        scheduler.step()  # yours: the scheduler's step, on all ranks; you can pass val_loss or score

        # new # DCP: FSDP: save without gathering; prune() keeps the folder with the best score
        best_score = max(best_score, score)
        values = {"epoch": epoch, "score": score, "best_score": best_score}
        saving = save(folder, epoch * len(train_loader), state, cpu_group, stager, saving, **values)

        # new # DDP: only one process saves and prints
        if not reduce.is_main_process():
            continue

        # new # DCP: elastic: write no last.pt, because no process has the whole model

        # new # elastic: the speed counts only the steps of this run
        speed = (len(train_loader) - first_step) * args.batch_size / seconds

        shown = {"loss": train_loss, "val_loss": val_loss, **metrics}
        scalars = shown | {"learning_rate": lr, "seconds": seconds, "images_per_second": speed}
        for name, value in scalars.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()
        print(f"epoch {epoch:3}/{args.epochs}  {cli.show(shown)}  lr {lr:.5f}  {seconds:.2f} s  "
              f"{speed:,.0f} images/s{devices.peak_memory(device)}")

    # new # DCP
    dcp_folders.wait(saving)


# new # DDP: connect the processes of one launch
def join_group(args):
    # torchrun and torch.distributed.launch set these variables; srun and plain python need this line
    os.environ.update(launch.launch_environment())
    local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))

    # Prepare the device first, or NCCL opens a context on device 0 and misses --deterministic's settings
    args.device = str(devices.prepare(args.device, args.deterministic, local_rank))
    torch.set_num_threads(launch.cores_per_process())
    backend = reduce.choose_backend(args.backend, args.device)
    device_id = torch.device(args.device) if backend == "nccl" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=device_id)


if __name__ == "__main__":
    with cli.report_errors():
        args = parse_args()

        # new # DDP
        join_group(args)

        # new # elastic: exit code 85 tells a batch script to requeue the job
        code = main(args)

        # new # DDP: only after success: after a failure, this could wait forever for other ranks
        dist.destroy_process_group()

        # new # elastic
        sys.exit(code)
