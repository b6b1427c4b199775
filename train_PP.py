"""Train a model as a pipeline: each process computes one stage, and micro-batches pass through all stages.

    torchrun --nproc-per-node=2 train_PP.py --model vit
    torchrun --nproc-per-node=4 train_PP.py --dataset cifar100 --model vit_base --micro-batches 16 --chunks 2
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST1:29400 train_PP.py
    srun --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --gpus-per-node=4 -K python train_PP.py

Parent: train_DDP.py
"""
import time

# new # DDP
import os
from datetime import timedelta

# new # PP
from functools import partial

# new # DDP
from common import checkpoint, cli, datasets, devices, errors, launch, loading, models, recipe, reduce

# new # PP
from common import clipping, pipeline, replay, shards

import torch

# new # DDP
import torch.distributed as dist

# new # PP
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

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

    # new # PP
    parser.add_argument("--micro-batches", type=cli.positive_int, help="per batch (default: 2+ per stage)")
    parser.add_argument("--chunks", type=cli.positive_int, default=1, help="stages per process, interleaved")
    parser.add_argument("--clip-norm", type=cli.positive, help="maximum gradient norm (default: no limit)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, also in evaluation")

    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help="set by old launchers")

    return parser.parse_args()


@torch.no_grad()
def evaluate(model, loader, normalize, device):
    """Return the mean loss and the mean of each metric over all samples; each sample counts once."""
    model.eval()
    sums = torch.zeros(2 + len(METRICS), device=device)
    for batch in loader:
        inputs, targets = (part.to(device, non_blocking=loader.pin_memory) for part in batch)
        outputs = model(normalize(inputs))

        # new # PP: only the last stage has outputs
        if outputs is None:
            continue

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


# new # PP: the stages of this process, and the order of their forward and backward passes
def create_schedule(parts, micro_batches, device, group, loss=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    local_stages = [
        PipelineStage(part, rank + number * world_size, len(parts) * world_size, device, group=group)
        for number, part in enumerate(parts)]
    if len(parts) > 1:
        return ScheduleInterleaved1F1B(local_stages, micro_batches, loss)
    return Schedule1F1B(local_stages[0], micro_batches, loss)


# new # PP: evaluation also runs through all stages; a schedule needs batches of equal size
def forward(schedule, batch_size, inputs):
    rows = torch.arange(batch_size, device=inputs.device) % len(inputs)
    outputs = schedule.eval(inputs[rows]) if dist.get_rank() == 0 else schedule.eval()
    return None if outputs is None else outputs[:len(inputs)]


def main(args):
    torch.manual_seed(args.seed)
    device = devices.prepare(args.device, args.deterministic)
    folder = checkpoint.make_folder(args.output_dir, lock=not args.evaluate)

    # yours: the data; every epoch shuffles the samples again and drops its incomplete last batch
    train_set, val_set = datasets.create_datasets(args.dataset, args.data_path, args.seed)
    datasets.require_samples(train_set, val_set, args.batch_size)

    # new # DDP: each process reads its share of each batch, in train.py's order
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # new # PP: all processes read whole batches: the first stage needs inputs, the last one targets
    local_batch_size = args.batch_size
    micro_batches = pipeline.split_batch(args.batch_size, args.micro_batches, world_size, args.chunks)
    sampler = DistributedSampler(train_set, 1, 0, seed=loading.seed(args.seed), drop_last=True)

    train_options = loading.options(args.workers, device, train_set)
    val_options = loading.options(args.workers, device, val_set)
    train_loader = DataLoader(train_set, local_batch_size, sampler=sampler, drop_last=True, **train_options)

    # new # PP
    val_share = range(len(val_set))

    val_loader = DataLoader(val_set, local_batch_size, sampler=val_share, **val_options)

    normalize = datasets.Normalize(train_set).to(device)

    # yours: the model
    # new # PP: create tensors without data; later, each process draws all weights and keeps its layers
    model, weights = replay.outline(models.create_model, args.model, *datasets.classes_and_shape(train_set))

    # new # DDP: convert BatchNorm before freezing layers and before creating the optimizer
    model = models.sync_batchnorm(model, device) if args.sync_bn else model

    if args.weights:
        models.load_weights(model, args.weights)
    if args.freeze_layers:
        models.freeze_layers(model)

    # new # PP: the group in which the stages send
    shards.reject_gloo(dist.get_backend(), device.type)
    backend = pipeline.peer_backend(dist.get_backend(), dist.Backend.backend_list)
    group = dist.new_group(backend=backend) if backend else None

    # new # PP: the layers of other processes stay on the meta device and keep their names
    parts = pipeline.cut(model, world_size * args.chunks, args.bf16)[rank::world_size]
    shards.fill(model, weights, device, parts)
    schedule = create_schedule(parts, micro_batches, device, group, criterion)
    model.forward = partial(forward, create_schedule(parts, micro_batches, device, group), local_batch_size)

    # yours: the optimizer; scale the learning rate linearly with the batch size only for SGD
    lr = args.lr * args.batch_size / 128
    optimizer = torch.optim.SGD(models.parameter_groups(model, args.weight_decay), lr, args.momentum)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.cosine(args.epochs, args.lrf))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    # new # PP: each process takes the tensors of its layers from the file
    start_epoch, best_score = checkpoint.resume(args.resume, folder, state, take=shards.take)

    if args.evaluate:
        if not args.weights and start_epoch == 1:
            raise errors.UsageError("--evaluate: no weights were loaded; pass --weights or --resume")
        val_loss, metrics = evaluate(model, val_loader, normalize, device)

        # new # DDP
        if not reduce.is_main_process():
            return

        print(f"val_loss {val_loss:.4f}  {cli.show(metrics)}")
        return

    datasets.save_classes(train_set, folder)
    # new # PP
    layout = f"{world_size} process(es) x {micro_batches} micro-batches x {args.batch_size // micro_batches}"

    headline = f"{device}: batch {args.batch_size} = {layout}, lr {lr:g}, {models.size(model)} parameters"

    # new # DDP: only one process writes the log
    writer = start_log(args, start_epoch, headline) if reduce.is_main_process() else None

    for epoch in range(start_epoch, args.epochs + 1):  # yours: early stopping: break here, on all ranks
        # Order, augmentation and dropout depend only on (seed, epoch), so a resumed run reproduces them
        datasets.set_epoch(train_set, epoch)

        # new # DDP: the sampler shuffles by epoch; each process draws its own dropout masks
        sampler.set_epoch(epoch)
        torch.manual_seed(loading.seed(args.seed, epoch) + rank)

        model.train()
        loss_sum = torch.zeros((), device=device)
        start = time.perf_counter()

        # new # DDP: only one process shows a progress bar
        bar = tqdm(train_loader, f"epoch {epoch}", leave=False, disable=not reduce.is_main_process() or None)

        for step, batch in enumerate(bar, 1):
            inputs, targets = (part.to(device, non_blocking=train_loader.pin_memory) for part in batch)
            optimizer.zero_grad()

            # new # PP: run forward and backward on each micro-batch; the last stage computes the losses
            losses = []
            stage_inputs = [normalize(inputs)] if rank == 0 else []
            schedule.step(*stage_inputs, target=targets, losses=losses)
            loss = sum(losses, torch.zeros((), device=device)) / micro_batches

            # new # PP: clip by the norm over all stages
            clipping.clip_grad_norm(model.parameters(), args.clip_norm, dist.group.WORLD)

            optimizer.step()
            # yours: a scheduler that steps after every batch; clip gradients above optimizer.step()
            loss_sum += loss.detach()

            # Reading the loss waits for the device: do it only every --log-every steps
            if step % args.log_every and step < len(train_loader):
                continue

            # new # PP: only the last stage has a loss; other stages add zero
            train_loss = reduce.reduce_sum(loss_sum).item() / step

            errors.require_finite(train_loss, f"epoch {epoch}, step {step}: the loss")
            bar.set_postfix(loss=f"{train_loss:.4f}")

        seconds = time.perf_counter() - start

        # new # PP: no buffers to broadcast: each layer exists in only one process

        val_loss, metrics = evaluate(model, val_loader, normalize, device)
        errors.require_finite(val_loss, f"epoch {epoch}, step {step}: the validation loss")
        score = metrics["accuracy"]  # yours: the score; best.pt is the epoch with the highest score
        lr = optimizer.param_groups[0]["lr"]
        scheduler.step()  # yours: the scheduler's step, on all ranks; you can pass val_loss or score
        is_best, best_score = score > best_score, max(best_score, score)

        # new # PP: gather whole tensors in rank 0's host memory; all processes must take part
        content = shards.gather(checkpoint.collect(state, epoch=epoch, score=score, best_score=best_score))

        # new # DDP: only one process saves and prints
        if not reduce.is_main_process():
            continue

        # Write one file under several names; last.pt comes last, because it marks the epoch as done
        names = ["best.pt"] if is_best else []
        if args.save_every and epoch % args.save_every == 0:
            names.append(f"epoch-{epoch:03}.pt")
        checkpoint.save_checkpoint(folder / "last.pt", content, names)

        speed = len(train_loader) * args.batch_size / seconds
        shown = {"loss": train_loss, "val_loss": val_loss, **metrics}
        scalars = shown | {"learning_rate": lr, "seconds": seconds, "images_per_second": speed}
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

        main(args)

        # new # DDP: only after success: after a failure, this could wait forever for other ranks
        dist.destroy_process_group()
