"""Train a language model on its own answers, rewarded by a program and compared within groups (GRPO).

    torchrun --nproc-per-node=2 -m language.train_GRPO --weights runs/sft/best.pt --output-dir runs/grpo
    torchrun --nproc-per-node=8 -m language.train_GRPO --dataset chat --data-path FILE.jsonl \
        --tokenizer FOLDER --model FOLDER --weights FOLDER --length 1024 --max-new 512 --lr 1e-6 --bf16 \
        --accum-steps 32 --activation-checkpointing
    srun --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --gpus-per-node=4 -K python -m language.train_GRPO \
        --weights runs/sft/best.pt

Parent: train_SFT.py
"""
import time

# new # DDP
import os
from datetime import timedelta

# new # DDP
from common import checkpoint, cli, datasets, devices, errors, launch, loading, models, recipe, reduce

# new # FSDP
from common import clipping, layers, replay, shards

from common.updates import WarmUp

# new # GRPO
from . import gpt, llama, pairs, sampling

import torch

# new # DDP
import torch.distributed as dist

# new # FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch.utils.data import DataLoader, DistributedSampler

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# new # GRPO: answers have different numbers of tokens, so the loss is a sum, not a mean
criterion = sampling.loss  # yours: the loss, a SUM over the tokens of answers
reward = sampling.parses  # yours: the reward: a function (row of the data, text of an answer)
METRICS = sampling.METRICS


def parse_args():
    parser = cli.ArgumentParser(__doc__)

    # new # SFT
    parser.add_argument("--dataset", choices=pairs.DATASETS, default="stdlib", help="stdlib: Python's code")
    parser.add_argument("--data-path", default="data.jsonl", help="chat: a file with one object per line")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of a published model (default: bytes)")

    # new # GRPO
    parser.add_argument("--length", type=cli.positive_int, default=512, help="tokens of prompt and answer")
    parser.add_argument("--too-long", choices=["drop", "cut"], default="drop", help="prompts without room")
    parser.add_argument("--windows", type=cli.positive_int, help="prompts in an epoch (default: all)")

    parser.add_argument("--sample", help="prompt to answer (default: one for validation); '' for none")
    parser.add_argument("--accum-steps", type=cli.positive_int, default=1, help="micro-batches per step")

    # new # GRPO
    parser.add_argument("--group", type=cli.positive_int, default=8, help="answers to each prompt")
    parser.add_argument("--max-new", type=cli.positive_int, default=96, help="tokens in an answer, at most")
    parser.add_argument("--temperature", type=cli.positive, default=1.0, help="divides the logits")
    parser.add_argument("--updates", type=cli.positive_int, default=1, help="optimizer steps per sampling")
    parser.add_argument("--clip-ratio", type=cli.positive, default=0.2, help="clip ratios to 1 +- this")

    parser.add_argument("--model", type=llama.size, default="gpt_tiny", help=llama.CHOICES)
    parser.add_argument("--weights", metavar="PATH", help="load the matching tensors from this file")
    parser.add_argument("--freeze-layers", action="store_true", help="train only the last layers")
    parser.add_argument("--epochs", type=cli.positive_int, default=10, help="passes over the training set")

    # new # GRPO
    parser.add_argument("--batch-size", type=cli.positive_int, default=64, help="prompts over ALL processes")

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

    # new # FSDP
    parser.add_argument("--replicas", type=cli.positive_int, default=1, help="copies of the sharded model")
    parser.add_argument("--reshard-after-forward", choices=["yes", "no"], default="yes", help="free weights")
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--clip-norm", type=cli.positive, help="maximum gradient norm (default: no limit)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, also in evaluation")
    parser.add_argument("--compile", action="store_true", help="compile each block of the model")

    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help="set by old launchers")

    return parser.parse_args()


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the mean loss and the mean of each metric over all samples; each sample counts once."""
    model.eval()
    sums = torch.zeros(2 + len(METRICS), device=device)

    # new # FSDP: all ranks run the same number of batches; padding samples come last and are not counted
    left = loader.sampler.own

    for batch in loader:
        inputs, targets = (part.to(device, non_blocking=loader.pin_memory) for part in batch)

        # new # GRPO: a group of answers to each prompt (N, group, T); `targets` are the prompts' numbers
        outputs = sampling.draw(model, loader.dataset, inputs, targets)[1].unflatten(0, (len(targets), -1))

        # new # FSDP
        if left <= 0:
            continue
        outputs, targets, left = outputs[:left], targets[:left], left - len(targets)

        # new # GRPO
        outputs = outputs.flatten(0, 1)
        rewards = sampling.rewards(reward, loader.dataset, targets, outputs)
        sums += sampling.measure(rewards, outputs)

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


def main(args):
    torch.manual_seed(args.seed)
    device = devices.prepare(args.device, args.deterministic)
    folder = checkpoint.make_folder(args.output_dir, lock=not args.evaluate)

    # new # GRPO: a window has a prompt and room for an answer
    # yours: the data; sampling.Prompts makes windows from rows, which the reward gets, and their tokens
    settings = args.max_new, args.group, args.temperature, args.seed
    source = args.dataset, args.data_path, args.tokenizer, args.length, args.windows, args.too_long
    train_set, val_set = sampling.create_datasets(*source, args.model.vocabulary, settings)

    datasets.require_samples(train_set, val_set, args.batch_size)

    # new # DDP: each process reads its share of each batch, in train.py's order
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_batch_size = reduce.exact_share(args.batch_size, world_size)
    sampler = DistributedSampler(train_set, seed=loading.seed(args.seed), drop_last=True)

    # new # GRPO: a micro-batch has at least one answer
    local_answers = local_batch_size * args.group
    if args.accum_steps > local_answers:
        raise errors.UsageError(f"--accum-steps {args.accum_steps} > {local_answers} answers per process")

    train_options = loading.options(args.workers, device, train_set)
    val_options = loading.options(args.workers, device, val_set)
    train_loader = DataLoader(train_set, local_batch_size, sampler=sampler, drop_last=True, **train_options)

    # new # FSDP: each forward pass gathers weights, so every rank must take part in it
    val_share = shards.EvenShare(len(val_set), rank, world_size)

    # new # GRPO: logits are large, so evaluate micro-batches of whole groups
    val_batch_size = max(1, local_batch_size // args.accum_steps)
    val_loader = DataLoader(val_set, val_batch_size, sampler=val_share, **val_options)

    # new # SFT: a token attends only to its own pair; a pair of several messages may have several end tokens
    # yours: the model; it separates documents by the pairs' numbers, not by end tokens
    end = None

    # new # FSDP: create tensors without data; later, each process draws all weights and keeps its shards
    model, weights = replay.outline(gpt.GPT, args.model, train_set.vocabulary, end)

    if args.weights:
        llama.load_weights(model, args.weights)  # also those that Hugging Face's transformers wrote
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

    # new # FSDP: now draw the weights and keep this process's shards
    shards.fill(model, weights, device)

    # new # FSDP: compile block by block, so that equal blocks compile once
    if args.compile:
        layers.compile_blocks(model)

    # yours: the optimizer; this learning rate does not depend on the batch size
    groups = models.parameter_groups(model, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, args.lr, (args.momentum, 0.95), fused=True)
    warmup = WarmUp(optimizer, args.warmup_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.cosine(args.epochs, args.lrf))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "warmup": warmup}

    # new # FSDP: the file contains whole tensors; each process takes its shards of them
    start_epoch, best_score = checkpoint.resume(args.resume, folder, state, take=shards.take)

    if args.evaluate:
        if not args.weights and start_epoch == 1:
            raise errors.UsageError("--evaluate: no weights were loaded; pass --weights or --resume")
        val_loss, metrics = evaluate(model, val_loader, device)

        # new # SFT
        sample = pairs.answer(model, val_set, args.sample, args.seed)

        # new # DDP
        if not reduce.is_main_process():
            return

        print(f"val_loss {val_loss:.4f}  {cli.show(metrics)}")
        if sample:
            print(sample)
        return

    # new # SFT
    micro_batch = local_batch_size / args.accum_steps
    layout = f"{world_size} process(es) x {args.accum_steps} micro-batch(es) x {micro_batch:g}"
    data = f"{args.dataset}: {train_set.describe()}"

    headline = f"{device}: batch {args.batch_size} = {layout}, {models.size(model)} parameters, {data}"

    # new # FSDP: a unit gathers all of its weights at once; a single unit would save no memory
    headline += f" in {shards.count_units(model)} FSDP units"

    # new # GRPO
    _, before = evaluate(model, val_loader, device)

    # new # DDP: only one process writes the log
    writer = start_log(args, start_epoch, headline) if reduce.is_main_process() else None

    for epoch in range(start_epoch, args.epochs + 1):  # yours: early stopping: break here, on all ranks
        # Windows, their order and dropout depend only on (seed, epoch), so a resumed run reproduces them
        datasets.set_epoch(train_set, epoch)

        # new # DDP: the sampler shuffles by epoch; each process draws its own dropout masks
        sampler.set_epoch(epoch)
        torch.manual_seed(loading.seed(args.seed, epoch) + rank)

        model.train()
        loss_sum = torch.zeros((), device=device)

        # new # GRPO
        sums, drift = torch.zeros(2 + len(METRICS), device=device), torch.zeros((), device=device)

        start = time.perf_counter()

        # new # DDP: only one process shows a progress bar
        bar = tqdm(train_loader, f"epoch {epoch}", leave=False, disable=not reduce.is_main_process() or None)

        for step, batch in enumerate(bar, 1):
            inputs, targets = (part.to(device, non_blocking=train_loader.pin_memory) for part in batch)

            # new # GRPO: each rank samples whole groups of answers, with the current weights
            inputs, answers, old = sampling.draw(model, train_set, inputs, targets)
            rewards = sampling.rewards(reward, train_set, targets, answers)
            advantages = sampling.advantages(rewards)
            sums += sampling.measure(rewards, answers)

            # new # GRPO: divide by the count over all micro-batches of all processes
            count = reduce.reduce_sum(pairs.count(answers))
            shares = [each.tensor_split(args.accum_steps) for each in (inputs, answers, old, advantages)]
            for update in range(args.updates):
                optimizer.zero_grad()
                for part, part_answers, part_old, part_advantages in zip(*shares):
                    new = sampling.log_probs(parallel_model(part), part_answers, args.temperature)

                    # new # GRPO: FSDP2 divides the sum of the gradients by world_size
                    part_loss = criterion(new, part_answers, part_old, part_advantages, args.clip_ratio)
                    part_loss = part_loss * world_size / count
                    part_loss.backward()
                    loss_sum += part_loss.detach() / args.updates

                    # new # GRPO: before the first update, the weights are still those that sampled
                    if update == 0:
                        drift = torch.maximum(drift, (new.detach() - part_old).abs().max())

                # new # GRPO: clip by the norm over all shards
                clipping.clip_grad_norm(model.parameters(), args.clip_norm)
                optimizer.step()  # yours: then a scheduler that steps after every update

            # Reading the loss waits for the device: do it only every --log-every steps
            if step % args.log_every and step < len(train_loader):
                continue

            # new # DDP: all processes get the same loss, so either all of them stop or none
            train_loss = reduce.reduce_sum(loss_sum).item() / world_size / step

            errors.require_finite(train_loss, f"epoch {epoch}, step {step}: the loss")
            bar.set_postfix(loss=f"{train_loss:.4f}")

        seconds = time.perf_counter() - start

        # new # DDP: no BatchNorm statistics to share or to broadcast: the model has no buffers

        # new # GRPO
        dist.all_reduce(sums)
        dist.all_reduce(drift, dist.ReduceOp.MAX)

        val_loss, metrics = evaluate(model, val_loader, device)
        errors.require_finite(val_loss, f"epoch {epoch}, step {step}: the validation loss")
        score = -val_loss  # yours: the score; best.pt is the epoch with the highest score

        # new # SFT
        sample = pairs.answer(model, val_set, args.sample, args.seed) if epoch == args.epochs else ""

        lr = optimizer.param_groups[0]["lr"] * warmup.factor
        scheduler.step()  # yours: the scheduler's step, on all ranks; you can pass val_loss or score
        is_best, best_score = score > best_score, max(best_score, score)

        # new # FSDP: gather whole tensors in rank 0's host memory; all processes must take part
        content = shards.gather(checkpoint.collect(state, epoch=epoch, score=score, best_score=best_score))

        # new # DDP: only one process saves and prints
        if not reduce.is_main_process():
            continue

        # Write one file under several names; last.pt comes last, because it marks the epoch as done
        names = ["best.pt"] if is_best else []
        if args.save_every and epoch % args.save_every == 0:
            names.append(f"epoch-{epoch:03}.pt")
        checkpoint.save_checkpoint(folder / "last.pt", content, names)

        # new # GRPO: tokens of answers
        speed = sums[-2].item() / seconds
        sampled = dict(zip(METRICS, (sums[1:-1] / sums[-1]).tolist()))

        shown = {"loss": train_loss, "val_loss": val_loss, **metrics}
        scalars = shown | {"learning_rate": lr, "seconds": seconds, "tokens_per_second": speed}
        for name, value in scalars.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()
        print(f"epoch {epoch:3}/{args.epochs}  {cli.show(shown)}  lr {lr:.2e}  {seconds:.2f} s  "

              # new # GRPO
              f"{speed:,.0f} tokens/s{devices.peak_memory(device)}")
        print(f"answers in training:  {cli.show(sampled)}")
        if drift > (1e-10 if drift.dtype == torch.float64 else 1e-3):
            print(f"log-probabilities differ by up to {drift:.1e} between sampling and the first update")
        if epoch == args.epochs:
            print(f"answers before this run:  {cli.show(before)}")
            print(f"answers after this run:  {cli.show(metrics)}")

        if sample:
            print(sample)


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
