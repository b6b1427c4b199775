"""Combine mixed precision, accumulation, clipping, snapshots and restarts with a training recipe.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # in torch 2.15 and older, restarts fail without this
    torchrun --nproc-per-node=gpu --max-restarts=3 train_combined.py --resume auto
    torchrun --nproc-per-node=gpu train_combined.py --dataset cifar100 --model resnet18 --batch-size 1024 \
        --clip-norm 1 --warmup-steps 500 --ema 0.999 --label-smoothing 0.1 --compile
    torchrun --nproc-per-node=2 train_combined.py --accum-steps 1 --precision fp32  # like train_DDP.py

Parents: train_amp.py, train_grad_accum.py, train_elastic.py
"""
import time

# new # combined
import copy

# new # DDP
import os
from datetime import timedelta

# new # elastic
import sys
from itertools import islice

# new # DDP
from common import checkpoint, cli, datasets, devices, errors, launch, loading, models, recipe, reduce

# new # elastic
from common import signals

# new # combined
from common import combined, layers, updates

import torch

# new # DDP
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# new # combined
from torch.optim.swa_utils import AveragedModel

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
    parser.add_argument("--find-unused-parameters", action="store_true", help="for models that skip layers")
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help="set by old launchers")

    # new # elastic
    parser.add_argument("--snapshot-every", type=cli.positive_int, default=100, help="save every N steps")

    # new # amp
    parser.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16", help="of the model")
    parser.add_argument("--clip-norm", type=cli.positive, help="maximum gradient norm (default: no limit)")

    # new # grad_accum
    parser.add_argument("--accum-steps", type=cli.positive_int, default=4, help="micro-batches per step")

    # new # combined: options of a training recipe, which are off by default
    parser.add_argument("--warmup-steps", type=cli.count, default=0, help="steps until the full rate")
    parser.add_argument("--label-smoothing", type=cli.fraction, default=0, help="in the training loss only")

    # new # combined: more options, which are off by default
    parser.add_argument("--ema", type=cli.fraction, default=0, help="decay of the averaged weights; 0: none")
    parser.add_argument("--compile", action="store_true", help="compile each block of the model")
    parser.add_argument("--compress", choices=["bf16", "powersgd"], help="how to compress DDP's gradients")
    parser.add_argument("--profile", action="store_true", help="write a trace of five steps per process")

    return parser.parse_args()


# new # elastic: a sampler that keeps its order but can start mid-epoch
class ResumableSampler(DistributedSampler):
    first = 0

    def __iter__(self):
        return islice(super().__iter__(), self.first, None)


@torch.no_grad()
def evaluate(model, loader, normalize, device):
    """Return the mean loss and the mean of each metric over all samples; each sample counts once."""
    model.eval()
    sums = torch.zeros(2 + len(METRICS), device=device)
    for batch in loader:
        inputs, targets = (part.to(device, non_blocking=loader.pin_memory) for part in batch)
        outputs = model(normalize(inputs))
        values = recipe.sum_metrics(METRICS, outputs, targets)
        sums[:-1] += torch.stack([criterion(outputs, targets) * len(targets), *values])
        sums[-1] += len(targets)

    # new # DDP: sums over all processes are exact; a mean of means is not
    dist.all_reduce(sums)

    loss, *totals, count = sums.tolist()
    metrics = {name: total / count for name, total in zip(METRICS, totals)}
    # yours: the ratios of these means, such as an IoU; pop the means that you do not want to print
    return loss / count, metrics


# new # combined: the metrics of the averaged weights, with the buffers of the model, such as BatchNorm's
def evaluate_average(average, model, *others):
    if not (average and average.n_averaged):
        return {}
    for own, buffer in zip(average.module.buffers(), model.buffers()):
        own.copy_(buffer)
    _, metrics = evaluate(average.module, *others)
    return {f"ema_{name}": value for name, value in metrics.items()}


# new # combined: a copy of the loss, which smooths the labels
def smooth(criterion, smoothing):
    smoothed = copy.copy(criterion)
    if smoothing:
        if not hasattr(criterion, "label_smoothing"):
            name = type(criterion).__name__
            raise errors.UsageError(f"--label-smoothing {smoothing:g}: {name} does not support it")
        smoothed.label_smoothing = smoothing
    return smoothed


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
    snapshots = checkpoint.BackgroundWriter()

    # yours: the data; every epoch shuffles the samples again and drops its incomplete last batch
    train_set, val_set = datasets.create_datasets(args.dataset, args.data_path, args.seed)
    datasets.require_samples(train_set, val_set, args.batch_size)

    # new # DDP: each process reads its share of each batch, in train.py's order
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_batch_size = reduce.exact_share(args.batch_size, world_size)

    # new # elastic
    sampler = ResumableSampler(train_set, seed=loading.seed(args.seed), drop_last=True)

    # new # grad_accum: the mean loss of an empty micro-batch is nan
    if args.accum_steps > local_batch_size:
        raise errors.UsageError(f"--accum-steps {args.accum_steps} > {local_batch_size} samples per process")

    train_options = loading.options(args.workers, device, train_set)
    val_options = loading.options(args.workers, device, val_set)

    # new # elastic: loader workers ignore the signals of Slurm or a launcher; this process handles them
    train_options["worker_init_fn"] = val_options["worker_init_fn"] = signals.shield_worker

    train_loader = DataLoader(train_set, local_batch_size, sampler=sampler, drop_last=True, **train_options)

    # new # DDP: this process's share of the validation set; DistributedSampler would repeat samples
    val_share = range(rank, len(val_set), world_size)
    val_loader = DataLoader(val_set, local_batch_size, sampler=val_share, **val_options)

    normalize = datasets.Normalize(train_set).to(device)

    # yours: the model
    model = models.create_model(args.model, *datasets.classes_and_shape(train_set))

    # new # DDP: convert BatchNorm before freezing layers and before creating the optimizer
    model = models.sync_batchnorm(model, device) if args.sync_bn else model

    if args.weights:
        models.load_weights(model, args.weights)
    if args.freeze_layers:
        models.freeze_layers(model)
    models.to_device(model, device)  # convolutions in channels-last, the fastest layout

    # new # combined: DDP: compile by block: equal blocks compile once, and DDP's buckets split no graph
    if args.compile:
        layers.compile_blocks(model)

    # new # DDP: the wrapper broadcasts rank 0's weights here, and averages gradients in each backward()
    # --deterministic searches for unused parameters, so that DDP does not rebuild its buckets after step 1
    parallel_model = DistributedDataParallel(
        model, gradient_as_bucket_view=True, **reduce.NO_BUFFER_BROADCAST,
        find_unused_parameters=args.find_unused_parameters or args.deterministic)

    # yours: the optimizer; scale the learning rate linearly with the batch size only for SGD
    lr = args.lr * args.batch_size / 128
    optimizer = torch.optim.SGD(models.parameter_groups(model, args.weight_decay), lr, args.momentum)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.cosine(args.epochs, args.lrf))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    # new # amp: small gradients vanish in fp16; scaling the loss prevents that
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.precision]
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    state["scaler"] = scaler

    # new # combined: amp: fp16 skips steps that overflow; the warm-up does not count them
    warmup = updates.WarmUp(optimizer, args.warmup_steps)
    state["warmup"] = warmup

    # new # combined: amp: the average does not count skipped steps, either
    average = AveragedModel(model) if args.ema else None
    if average:
        state["average"] = average
        updates.after_update(optimizer, lambda: updates.update_average(average, model, args.ema))

    # new # combined: evaluate() measures the loss without smoothing
    train_criterion = smooth(criterion, args.label_smoothing)

    # new # combined: DDP: compress the gradients that DDP sends; trace a few steps
    combined.compress(parallel_model, args.compress, scaler.is_enabled())
    if args.profile:
        combined.trace(folder, device, optimizer, rank)

    # new # elastic: the position within the epoch, if the checkpoint is a snapshot
    order = f"--batch-size {args.batch_size} --seed {args.seed}"
    progress = {"step": 0, "train_loss": 0.0, "order": order}
    start_epoch, best_score = checkpoint.resume(args.resume, folder, state, progress)
    if progress["order"] != order:
        raise errors.UsageError(f"--resume: this epoch began with {progress['order']}; use it, not {order}")

    if args.evaluate:
        # new # elastic: a snapshot from the first epoch also counts as loaded weights
        if not args.weights and start_epoch == 1 and not progress["step"]:

            raise errors.UsageError("--evaluate: no weights were loaded; pass --weights or --resume")
        val_loss, metrics = evaluate(model, val_loader, normalize, device)

        # new # combined
        metrics |= evaluate_average(average, model, val_loader, normalize, device)

        # new # DDP
        if not reduce.is_main_process():
            return

        print(f"val_loss {val_loss:.4f}  {cli.show(metrics)}")
        return

    datasets.save_classes(train_set, folder)
    # new # grad_accum
    micro_batch = local_batch_size / args.accum_steps
    layout = f"{world_size} process(es) x {args.accum_steps} micro-batches x {micro_batch:g}"

    headline = f"{device}: batch {args.batch_size} = {layout}, lr {lr:g}, {models.size(model)} parameters"

    # new # DDP: only one process writes the log
    writer = start_log(args, start_epoch, headline) if reduce.is_main_process() else None

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

            # new # grad_accum: all micro-batches except the last accumulate locally and send nothing
            shares = inputs.tensor_split(args.accum_steps), targets.tensor_split(args.accum_steps)
            *parts, last_part = zip(*shares)
            with parallel_model.no_sync():
                for part, part_targets in parts:

                    # new # combined: amp + grad_accum: run each micro-batch under autocast
                    with torch.autocast(device.type, dtype, enabled=args.precision != "fp32"):

                        # new # combined: grad_accum: the training loss, which can smooth labels
                        loss = train_criterion(parallel_model(normalize(part)), part_targets)

                    loss = loss * len(part_targets) / local_batch_size

                    # new # combined: amp + grad_accum: all micro-batches of a step need the same scale
                    scaler.scale(loss).backward()

                    loss_sum += loss.detach()

            # new # grad_accum: the last part runs outside no_sync, so DDP reduces the accumulated gradient
            inputs, targets = last_part

            # new # amp: autocast picks the precision of each operation, also in backward()
            with torch.autocast(device.type, dtype, enabled=args.precision != "fp32"):

                # new # combined: amp: the training loss, which can smooth labels
                loss = train_criterion(parallel_model(normalize(inputs)), targets)

            # new # grad_accum: weight the loss by size, because micro-batches may differ in size
            loss = loss * len(targets) / local_batch_size

            # new # amp: unscale before clipping, which needs the norm of the true gradients
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if args.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
            scaler.step(optimizer)
            scaler.update()

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
                content = checkpoint.collect(state, **values, score=best_score, best_score=best_score)
                if reduce.is_main_process():
                    snapshots.save(folder / "last.pt", content)

            # new # elastic: wait for the save: if one rank exits, the launcher kills the rest
            if stopping:
                snapshots.wait()
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

        # new # combined: DDP: evaluate after the broadcast of rank 0's BatchNorm statistics
        metrics |= evaluate_average(average, model, val_loader, normalize, device)

        score = metrics["accuracy"]  # yours: the score; best.pt is the epoch with the highest score
        lr = optimizer.param_groups[0]["lr"]

        # new # combined: show the learning rate of the last update
        lr *= warmup.factor

        scheduler.step()  # yours: the scheduler's step, on all ranks; you can pass val_loss or score
        is_best, best_score = score > best_score, max(best_score, score)
        content = checkpoint.collect(state, epoch=epoch, score=score, best_score=best_score)

        # new # DDP: only one process saves and prints
        if not reduce.is_main_process():
            continue

        # new # elastic: finish writing the older snapshot first
        snapshots.wait()

        # Write one file under several names; last.pt comes last, because it marks the epoch as done
        names = ["best.pt"] if is_best else []
        if args.save_every and epoch % args.save_every == 0:
            names.append(f"epoch-{epoch:03}.pt")
        checkpoint.save_checkpoint(folder / "last.pt", content, names)

        # new # elastic: the speed counts only the steps of this run
        speed = (len(train_loader) - first_step) * args.batch_size / seconds

        shown = {"loss": train_loss, "val_loss": val_loss, **metrics}
        scalars = shown | {"learning_rate": lr, "seconds": seconds, "images_per_second": speed}

        # new # combined: amp: there are fewer updates than steps if fp16 skipped some
        scalars["updates"] = warmup.done

        for name, value in scalars.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()
        print(f"epoch {epoch:3}/{args.epochs}  {cli.show(shown)}  lr {lr:.5f}  {seconds:.2f} s  "
              f"{speed:,.0f} images/s{devices.peak_memory(device)}")


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
