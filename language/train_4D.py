"""Divide a language model in four ways: data (FSDP2), tensor, context and pipeline parallelism.

    torchrun --nproc-per-node=2 -m language.train_4D --resume auto
    torchrun --nproc-per-node=8 -m language.train_4D --pipeline-parallel 2 --tensor-parallel 2 --resume auto
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST1:29400 \
        -m language.train_4D
    srun --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --gpus-per-node=4 -K python -m language.train_4D

Like ../train_DCP.py, this script saves folders, also within an epoch, and on SIGTERM or SIGUSR1.

Parents: train_CP.py, ../train_PP.py, ../train_DCP.py
"""
import time

# new # DDP
import os
from datetime import timedelta

# new # PP
from functools import partial

# new # elastic
import sys
from itertools import islice

# new # DDP
from common import checkpoint, cli, datasets, devices, errors, launch, loading, models, recipe, reduce

# new # FSDP
from common import clipping, layers, replay, shards

# new # TP
from common import tensor_parallel

from common.updates import WarmUp
from . import gpt, llama, text

# new # TP
from . import sequence

# new # CP
from . import context

# new # 4D: PP: the blocks of FSDP already import the other modules
from common import pipeline
from . import stages

# new # elastic
from common import signals

# new # DCP
from common import dcp_folders

import torch

# new # DDP
import torch.distributed as dist

# new # FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# new # TP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# new # TP
from torch.distributed.tensor import Replicate, Shard, parallel

# new # PP
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

# new # DCP
import torch.distributed.checkpoint as dcp

from torch.utils.data import DataLoader, DistributedSampler

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# new # TP: each process has the logits of a part of the vocabulary; see loss_parallel() below
criterion = sequence.whole(gpt.loss)
METRICS = {"accuracy": sequence.whole(gpt.hits), "bits": sequence.whole(gpt.bits)}

# new # TP: yours: the layers to split; between them, each process has a part of every sequence
COLUMNS = ["model.layers.*.self_attn.[qkv]_proj", "model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_*"]
ROWS = ["model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"]
NORMS = ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"]
PLAN = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(NORMS, sequence.SequenceParallel())
PLAN |= dict.fromkeys(ROWS, RowwiseParallel(output_layouts=Shard(1)))
PLAN["model.layers.*.self_attn"] = PLAN["model.layers.*.mlp"] = parallel.PrepareModuleInput(
    input_layouts=Shard(1), desired_input_layouts=Replicate())
PLAN["logits"] = parallel.PrepareModuleInput(
    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
PLAN["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
PLAN["lm_head"] = ColwiseParallel()


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--dataset", choices=text.DATASETS, default="stdlib", help="stdlib: Python's code")
    parser.add_argument("--data-path", default="data", help="text: file or folder; tokens: folder")
    parser.add_argument("--length", type=cli.positive_int, default=128, help="tokens in a window")
    parser.add_argument("--windows", type=cli.positive_int, default=1792, help="windows in an epoch")
    parser.add_argument("--document-mask", action="store_true", help="attend only within each document")
    parser.add_argument("--sample", default="def ", help="beginning of a text to write; '' for none")
    parser.add_argument("--model", type=llama.size, default="gpt_tiny", help=llama.CHOICES)
    parser.add_argument("--weights", metavar="PATH", help="load the matching tensors from this file")
    parser.add_argument("--freeze-layers", action="store_true", help="train only the last layers")
    parser.add_argument("--epochs", type=cli.positive_int, default=10, help="passes over the training set")
    parser.add_argument("--batch-size", type=cli.positive_int, default=64, help="samples over ALL processes")
    parser.add_argument("--lr", type=cli.positive, default=2e-3, help="for AdamW; independent of batch size")
    parser.add_argument("--warmup-steps", type=cli.count, default=50, help="steps until the full rate")
    parser.add_argument("--lrf", type=cli.fraction, default=0.01, help="final rate as a fraction of --lr")
    parser.add_argument("--momentum", type=cli.fraction, default=0.9, help="the first beta of AdamW")
    parser.add_argument("--weight-decay", type=cli.not_negative, default=0.1, help="skips biases and norms")
    parser.add_argument("--workers", type=cli.count, help="loader processes (default: set automatically)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, xpu, mps (default: an accelerator, else cpu)")
    parser.add_argument("--deterministic", action="store_true", help="make runs bit-identical; slower")
    parser.add_argument("--seed", type=cli.count, default=0, help="for weights, windows and their order")
    parser.add_argument("--output-dir", default="runs", help="folder for checkpoints and TensorBoard")
    parser.add_argument("--resume", metavar="PATH", help="a checkpoint, or auto: last.pt in --output-dir")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the loaded weights")
    parser.add_argument("--log-every", type=cli.positive_int, default=10, help="read the loss every N steps")
    parser.add_argument("--save-every", type=cli.count, default=0, help="also keep every Nth checkpoint")

    # new # DDP
    parser.add_argument("--backend", help="nccl, gloo, ... (default: nccl on CUDA, gloo on CPU)")
    parser.add_argument("--timeout", type=cli.positive, default=600, help="seconds to wait for other ranks")

    # new # CP: TP: the sizes of the tensor and context groups
    parser.add_argument("--tensor-parallel", type=cli.positive_int, default=1, help="processes per layer")
    parser.add_argument("--context-parallel", type=cli.positive_int, help="per sequence (default: 2)")

    # new # 4D
    parser.add_argument("--pipeline-parallel", type=cli.positive_int, help="stages (default: 2)")

    # new # PP
    parser.add_argument("--micro-batches", type=cli.positive_int, help="per batch (default: 2+ per stage)")
    parser.add_argument("--chunks", type=cli.positive_int, default=1, help="stages per process, interleaved")

    parser.add_argument("--reshard-after-forward", choices=["yes", "no"], default="yes", help="free weights")
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--clip-norm", type=cli.positive, help="maximum gradient norm (default: no limit)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, also in evaluation")
    parser.add_argument("--compile", action="store_true", help="compile each block of the model")

    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help="set by old launchers")

    # new # elastic
    parser.add_argument("--snapshot-every", type=cli.positive_int, default=100, help="save every N steps")

    return parser.parse_args()


# new # CP: gather the keys or values of all positions; backward() sums their gradients
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group, order):
        ctx.group, ctx.order = group, order
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in order]
        dist.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts, 2)[:, :, order.flatten().argsort()]

    @staticmethod
    def backward(ctx, gradient):
        parts = [gradient[:, :, positions].contiguous() for positions in ctx.order]
        part = torch.empty_like(parts[0])
        dist.reduce_scatter(part, parts, group=ctx.group)
        return part, None, None


# new # CP: this process's queries attend to all positions
def attend(group, order, q, k, v, mask):
    gathered = [Gather.apply(part, group, order) for part in (k, v)]
    return context.attend(q, *gathered, mask, group.rank(), group.size())


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
def evaluate(model, loader, device):
    """Return the mean loss and the mean of each metric over all samples; each sample counts once."""
    model.eval()
    sums = torch.zeros(2 + len(METRICS), device=device)

    # new # FSDP: all ranks run the same number of batches; padding samples come last and are not counted
    left = loader.sampler.own

    for batch in loader:
        inputs, targets = (part.to(device, non_blocking=loader.pin_memory) for part in batch)

        # new # CP
        targets = model.part(targets)

        outputs = model(inputs)

        # new # PP: only the last stage has outputs
        if outputs is None:
            continue

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
    # yours: what follows from these means, such as the perplexity; pop those that you do not want to print
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


# new # 4D: PP: each stage gets the tokens, because the document mask depends on them
def forward(schedule, batch_size, group, tokens):
    rows = tokens[torch.arange(batch_size, device=tokens.device) % len(tokens)]
    outputs = schedule.eval(rows, tokens=rows) if group.rank() == 0 else schedule.eval(tokens=rows)
    return None if outputs is None else outputs[:len(tokens)]


def main(args):
    torch.manual_seed(args.seed)
    device = devices.prepare(args.device, args.deterministic)
    folder = checkpoint.make_folder(args.output_dir, lock=not args.evaluate)

    # new # elastic: a signal sets a flag; the loop stops once all processes know about the signal
    stop = signals.note_signals("SIGTERM", "SIGUSR1")

    # new # DCP: elastic: a separate CPU group keeps the messages of saving apart from those of training
    cpu_group, stager, saving = dist.new_group(backend="gloo"), dcp_folders.create_stager(device.type), None

    # yours: the data; a sample is a window of tokens, and its targets are the next tokens
    train_set, val_set = text.create_datasets(
        args.dataset, args.data_path, args.length, args.windows, args.seed, args.model.vocabulary)
    datasets.require_samples(train_set, val_set, args.batch_size)

    # new # 4D: TP: the processes of a tensor group and of a pipeline read the same samples
    grid = dist.init_device_mesh(
        device.type, **stages.pp_mesh(args.pipeline_parallel, args.tensor_parallel, device))
    group = grid["pipeline"].get_group()

    # new # CP: TP: each context group reads one share of the samples; FSDP2 shards over data and context
    readers = dist.init_device_mesh(device.type, **context.divide(grid, args.context_parallel, args.length))
    rank, world_size = readers["data"].get_local_rank(), readers["data"].size()

    local_batch_size = reduce.exact_share(args.batch_size, world_size)

    # new # 4D: PP: divide one pipeline's samples into micro-batches
    micro_batches = pipeline.split_batch(local_batch_size, args.micro_batches, group.size(), args.chunks)

    # new # 4D: elastic + TP
    sampler = ResumableSampler(train_set, world_size, rank, seed=loading.seed(args.seed), drop_last=True)

    train_options = loading.options(args.workers, device, train_set)
    val_options = loading.options(args.workers, device, val_set)

    # new # elastic: loader workers ignore the signals of Slurm or a launcher; this process handles them
    train_options["worker_init_fn"] = val_options["worker_init_fn"] = signals.shield_worker

    train_loader = DataLoader(train_set, local_batch_size, sampler=sampler, drop_last=True, **train_options)

    # new # FSDP: each forward pass gathers weights, so every rank must take part in it
    val_share = shards.EvenShare(len(val_set), rank, world_size)

    val_loader = DataLoader(val_set, local_batch_size, sampler=val_share, **val_options)

    # yours: the model
    end = text.end(train_set.vocabulary, args.model.end) if args.document_mask else None

    # new # FSDP: create tensors without data; later, each process draws all weights and keeps its shards
    model, weights = replay.outline(gpt.GPT, args.model, train_set.vocabulary, end)

    if args.weights:
        llama.load_weights(model, args.weights)  # also those that Hugging Face's transformers wrote
    if args.freeze_layers:
        models.freeze_layers(model)

    # new # TP: split the layers first; FSDP2 then shards each part over the groups
    mesh = grid["data"]

    half, single = (torch.bfloat16, torch.float32) if args.bf16 else (None, None)
    policy, root_policy = MixedPrecisionPolicy(half, single), MixedPrecisionPolicy(half, single, single)
    blocks = layers.blocks(model, args.activation_checkpointing, args.bf16)

    # new # TP
    parallelize_module(model, grid["tensor"], tensor_parallel.check_plan(model, PLAN, grid))

    for block, reshard in shards.units(blocks, args.reshard_after_forward == "yes"):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)

    # new # 4D: FSDP + PP: each stage is an FSDP2 root; other processes' layers stay on the meta device
    parts = stages.cut(model, group.size() * args.chunks, group.size())[group.rank()::group.size()]
    for part in parts:
        shards.sum_gradients(fully_shard(part, mesh=mesh, mp_policy=root_policy))

    shards.fill(model, weights, device, parts)

    # new # 4D: PP: a schedule without a loss only computes outputs
    evaluation = create_schedule(parts, micro_batches, device, group)
    model.forward = partial(forward, evaluation, local_batch_size, group)

    schedule = create_schedule(parts, micro_batches, device, group, criterion)

    # new # CP: only attention needs the positions of other processes
    context_group = readers["context"].get_group()
    positions = context.order(args.length, context_group.size(), device)
    model.positions = positions[context_group.rank()]
    model.attend = lambda *inputs: attend(context_group, positions, *inputs)

    # new # FSDP: compile block by block, so that equal blocks compile once
    if args.compile:
        layers.compile_blocks(model)

    # yours: the optimizer; this learning rate does not depend on the batch size
    groups = models.parameter_groups(model, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, args.lr, (args.momentum, 0.95), fused=True)
    warmup = WarmUp(optimizer, args.warmup_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.cosine(args.epochs, args.lrf))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "warmup": warmup}

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
        val_loss, metrics = evaluate(model, val_loader, device)
        sample = gpt.write(model, args.sample, 200, args.length, args.seed)

        # new # DDP
        if not reduce.is_main_process():
            return

        print(f"val_loss {val_loss:.4f}  {cli.show(metrics)}")
        if sample:
            print(sample)
        return

    # new # CP: TP: show the sizes of the tensor and context groups
    sizes = f"{context_group.size()} (context) x {grid['tensor'].size()} (tensor)"

    # new # 4D: CP + PP: show the sizes of all groups
    layout = f"{world_size} group(s) of {sizes} x {group.size()} (pipeline) process(es)"
    layout += f" x {micro_batches} micro-batches x {local_batch_size // micro_batches}"

    data = f"{args.dataset}: {text.digest(train_set)}"
    headline = f"{device}: batch {args.batch_size} = {layout}, {models.size(model)} parameters, {data}"

    # new # FSDP: a unit gathers all of its weights at once; a single unit would save no memory
    headline += f" in {shards.count_units(model)} FSDP units"

    # new # DDP: only one process writes the log
    writer = start_log(args, start_epoch, headline) if reduce.is_main_process() else None

    # new # DCP: reject folders that are newer than this run: prune() would delete this run's instead
    dcp_folders.reject_newer(folder, (start_epoch - 1) * len(train_loader) + progress["step"])

    for epoch in range(start_epoch, args.epochs + 1):  # yours: early stopping: break here, on all ranks
        # Windows, their order and dropout depend only on (seed, epoch), so a resumed run reproduces them
        datasets.set_epoch(train_set, epoch)

        # new # DDP: the sampler shuffles by epoch; each process draws its own dropout masks
        sampler.set_epoch(epoch)
        torch.manual_seed(loading.seed(args.seed, epoch) + rank)

        # new # elastic: skip the finished steps of this epoch without reading their samples
        first_step, progress["step"] = progress["step"], 0
        step, train_loss = first_step, progress["train_loss"]
        sampler.first = first_step * local_batch_size

        model.train()

        # new # 4D: elastic: start from the finished steps' losses, divided over the stages
        loss_sum = torch.full((), train_loss * first_step / group.size(), device=device)

        start = time.perf_counter()

        # new # DDP: only one process shows a progress bar
        bar = tqdm(train_loader, f"epoch {epoch}", leave=False, disable=not reduce.is_main_process() or None)

        # new # elastic: steps count from the start of the epoch; dropout depends on the step
        bar.update(first_step)
        for step, batch in enumerate(bar, first_step + 1):
            torch.manual_seed(loading.seed(args.seed, epoch, step, rank))

            inputs, targets = (part.to(device, non_blocking=train_loader.pin_memory) for part in batch)

            # new # CP: the targets are already shifted, so take the same positions as for the inputs
            targets = model.part(targets)

            optimizer.zero_grad()

            # new # PP: run forward and backward on each micro-batch; the last stage computes the losses
            losses = []

            # new # 4D: PP: each stage also gets the tokens
            stage_inputs = [inputs] if group.rank() == 0 else []
            schedule.step(*stage_inputs, tokens=inputs, target=targets, losses=losses)

            loss = sum(losses, torch.zeros((), device=device)) / micro_batches

            # new # 4D: copies of a tied embedding get the summed gradient; the norm covers all stages
            stages.sum_tied(model, group)
            clipping.clip_grad_norm(model.parameters(), args.clip_norm, group, stages.tied(model, group))

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

            # new # 4D: elastic
            train_loss = loss_total / grid["data", "tensor"].size() / step

            errors.require_finite(train_loss, f"epoch {epoch}, step {step}: the loss")
            bar.set_postfix(loss=f"{train_loss:.4f}")

            # new # elastic: copy the weights now, and write the copy while training continues
            if stopping or step % args.snapshot_every == 0:

                # new # 4D: elastic: each process checks its part of the weights
                held = [weight.to_local() for weight in model.parameters() if not weight.is_meta]
                norm = reduce.reduce_sum(torch.nn.utils.get_total_norm(held)).item()

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

        # new # DDP: no BatchNorm statistics to share or to broadcast: the model has no buffers

        # new # TP: each process of a group has a copy of the unsplit layers: keep these copies equal
        tensor_parallel.equalize(model, optimizer, grid["tensor"])

        val_loss, metrics = evaluate(model, val_loader, device)
        errors.require_finite(val_loss, f"epoch {epoch}, step {step}: the validation loss")
        score = -val_loss  # yours: the score; best.pt is the epoch with the highest score
        sample = gpt.write(model, args.sample, 200, args.length, args.seed) if epoch == args.epochs else ""
        lr = optimizer.param_groups[0]["lr"] * warmup.factor
        scheduler.step()  # yours: the scheduler's step, on all ranks; you can pass val_loss or score

        # new # DCP: FSDP: save without gathering; prune() keeps the folder with the best score
        best_score = max(best_score, score)
        values = {"epoch": epoch, "score": score, "best_score": best_score}
        saving = save(folder, epoch * len(train_loader), state, cpu_group, stager, saving, **values)

        # new # DDP: only one process saves and prints
        if not reduce.is_main_process():
            continue

        # new # DCP: elastic: write no last.pt, because no process has the whole model

        # new # 4D: elastic: the speed counts only the steps of this run
        speed = (len(train_loader) - first_step) * args.batch_size * args.length / seconds

        shown = {"loss": train_loss, "val_loss": val_loss, **metrics}
        scalars = shown | {"learning_rate": lr, "seconds": seconds, "tokens_per_second": speed}
        for name, value in scalars.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()
        print(f"epoch {epoch:3}/{args.epochs}  {cli.show(shown)}  lr {lr:.2e}  {seconds:.2f} s  "
              f"{speed:,.0f} tokens/s{gpt.utilization(model, args.length, speed, device)}"
              f"{devices.peak_memory(device)}")
        if sample:
            print(sample)

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

        # new # TP: compute the cross-entropy, and its backward(), on logits split by vocabulary
        with parallel.loss_parallel():

            # new # 4D: TP + elastic: exit code 85 tells a batch script to requeue the job
            code = main(args)

        # new # DDP: only after success: after a failure, this could wait forever for other ranks
        dist.destroy_process_group()

        # new # elastic
        sys.exit(code)
