"""Records a small loop on one process, and on two with one mistake each: mistakes.py FOLDER.

Every process is forked from this one, which has imported torch. FOLDER/MISTAKE on 2 holds what its two ranks recorded,
FOLDER/WAY what the loop of ending.py recorded, which ends in that way.
"""
import contextlib
import copy
import gc
import multiprocessing.util
import os
import sys
from pathlib import Path

import ending
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from verify.recording import Recorder

MISTAKES = [
    "right", "weights of each rank", "model instead of DDP", "scheduler on rank 0", "no set_epoch", "summed loss",
    "rate times 2", "batch per process", "fewer epochs", "no sampler", "batchnorm", "batchnorm left in eval",
    "mean over own tokens", "rank 0 stops", "clip per rank", "functional dropout", "weight decay", "decay of ranks",
    "16 bits in the step", "rows by hand", "equal rows by hand", "cut by hand", "cut by hand, packed",
    "cut by hand, replicated", "cut by hand, summed again", "parts of a gradient", "detached loss", "one layer doubled",
    "mean without backward", "average on rank 0", "average", "buffer of a share", "gradient flipped", "gradients reset",
    "batchnorm at rest", "other values", "order of one process", "owned by ranks", "owned by ranks, not sent",
    "average of one epoch", "gradients kept", "labels smoothed", "noise of each rank", "local SGD", "local SGD, copied",
    "fused", "gathered loss", "lists", "lists, half of a batch", "lists, padding read", "rows by hand, from a buffer",
    "batchnorm without backward", "joined", "joined, own mean", "joined, half of a batch",
    "rows by hand, points", "augmented", "augmented, no set_epoch", "two loaders", "two loaders, own mean",
    "two loaders, one order", "two loaders, taken", "two loaders, taken, one order", "two loaders, taken, own mean",
    "two loaders, taken, half of it", "penalty", "penalty, constant", "sharded", "sharded, not reduced",
    "sharded, clipped per rank", "sharded, half clipped", "weighted", "weighted, own median", "weighted, own mean",
    "weighted, taught", "scaled", "owned by ranks, scheduler on rank 0", "owned by ranks, gradients kept",
    "flat", "flat, decayed", "flat, not sent", "averaged in a hook", "each sample",
    "each sample, one dropped", "each sample, other noise", "noise on gradients",
    "set_epoch on rank 0", "penalty, attacked"]
WAYS = ["well", "keywords", "nan", "by-hand", "complex", "turns", "turns-reset", "turns-alone", "closure"]


class Sixteen(torch.optim.Optimizer):
    """Multiplies in 16 bits, as torch.optim.Muon does, and adds in `parts`, as a product on several threads does."""

    def __init__(self, parameters, lr, parts):
        super().__init__(parameters, {"lr": lr})
        self.parts = parts

    @torch.no_grad()
    def step(self):
        casts = torch.Tensor.bfloat16, torch.Tensor.half, *[
            lambda grad, name=name: getattr(grad, name)(torch.bfloat16) for name in ("to", "type")]
        for cast, parameter in zip(casts, self.param_groups[0]["params"]):
            grad = cast(parameter.grad.reshape(len(parameter), -1).T)
            gram = sum(part.T @ part for part in grad.chunk(self.parts))
            update = (grad - grad @ gram).T.reshape(parameter.shape)
            parameter -= self.param_groups[0]["lr"] * update.to(parameter.dtype)


class Sum(torch.autograd.Function):
    """Add the outputs of two ranks, of which there may be two replicas; the backward pass is the identity."""

    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole / (dist.get_world_size() // 2)

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumAgain(Sum):
    """Also add the gradients of all ranks, as the deprecated torch.distributed.nn.all_reduce does."""

    @staticmethod
    def backward(ctx, grad):
        return Sum.forward(ctx, grad)


class OwnSync(nn.BatchNorm1d):
    """Normalizes with the sums of all ranks, through which no gradient passes."""

    def forward(self, x):
        sums = torch.stack([x.sum(0), x.square().sum(0), torch.ones_like(x).sum(0)])
        if dist.is_initialized():
            dist.all_reduce(sums)
        mean = sums[0] / sums[2]
        return (x - mean) / (sums[1] / sums[2] - mean.square() + self.eps).sqrt() * self.weight + self.bias


class Augmented(TensorDataset):
    """The values of a sample depend on the epoch."""

    def __getitem__(self, index):
        x, *others = super().__getitem__(index)
        return x + self.epoch, *others


class Padded(nn.Module):
    """Maps a list of samples of different lengths, (L, 4) each, to (N, longest L, 3); `read` lets it read padding."""

    def __init__(self, read):
        super().__init__()
        self.read, self.layer = read, nn.Linear(4, 3)

    def forward(self, samples):
        padded = nn.utils.rnn.pad_sequence([self.layer(sample) for sample in samples], batch_first=True)
        return padded / padded.shape[1] if self.read else padded


def train_on_lists(mistake, rank, world):
    """A batch is a list of samples of different lengths, and their labels; a batch sampler divides each batch."""
    torch.manual_seed(0)
    model = Padded("read" in mistake and world > 1)
    wrapped = DistributedDataParallel(model) if world > 1 else model
    g = torch.Generator().manual_seed(2)
    data = [(torch.randn(2 + number % 7, 4, generator=g), number % 3) for number in range(48)]
    sampler = DistributedSampler(data, 1, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = torch.tensor([*sampler]).view(6, 8)
        batches = batches[:, :8 // world] if "half" in mistake else batches[:, rank::world]
        loader = DataLoader(data, batch_sampler=batches.tolist(), collate_fn=lambda samples: (
            [x + 0 * torch.rand(1) for x, _ in samples], torch.tensor([y for _, y in samples])))
        for x, y in loader:
            model.zero_grad()
            lengths = torch.tensor([len(sample) for sample in x])
            total = lengths.sum()
            if world > 1:
                dist.all_reduce(total)
            losses = nn.functional.cross_entropy(wrapped(x).transpose(1, 2), y[:, None].expand(-1, max(lengths)),
                                                 reduction="none")
            mask = torch.arange(max(lengths)) < lengths[:, None]
            ((losses * mask).sum() * world / total).backward()
            optimizer.step()


class Joined(nn.Module):
    """Maps the rows of all samples (L, 4), and the number of each row's sample in the batch, to (L, 3)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows, numbers):
        found = self.layer(rows)
        return found + torch.zeros(int(numbers.max()) + 1, 3).index_add(0, numbers, found.tanh())[numbers]


def train_on_joined(mistake, rank, world):
    """A batch has the rows of all its samples in one tensor, as batches of graphs have: no tensor is one per sample."""
    torch.manual_seed(0)
    model = Joined()
    wrapped = DistributedDataParallel(model) if world > 1 else model
    g = torch.Generator().manual_seed(2)
    data = [(torch.randn(2 + number % 7, 4, generator=g), torch.randint(3, (2 + number % 7,), generator=g))
            for number in range(48)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        batches = torch.randperm(48, generator=torch.Generator().manual_seed(epoch)).view(6, 8)
        batches = batches[:, :8 // world] if "half" in mistake else batches[:, rank::world]
        loader = DataLoader(data, batch_sampler=batches.tolist(), collate_fn=lambda samples: (
            torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples]),
            torch.arange(len(samples)).repeat_interleave(torch.tensor([len(x) for x, _ in samples]))))
        for x, y, numbers in loader:
            model.zero_grad()
            total = torch.tensor(len(x)) * (world if "own" in mistake else 1)
            if world > 1 and "own" not in mistake:
                dist.all_reduce(total)
            loss = nn.functional.cross_entropy(wrapped(x, numbers), y, reduction="sum") * world / total
            loss.backward()
            optimizer.step()


def train_on_two_loaders(mistake, rank, world):
    """Two tasks, each with a loader of its own: classes, and numbers of which some are missing (NaN)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    wrapped = DistributedDataParallel(model) if world > 1 and "taken" not in mistake else model
    numbers = torch.randn(24, generator=torch.Generator().manual_seed(3))
    numbers[::3] = torch.nan
    sets = [TensorDataset(torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(2)), labels)
            for labels in (torch.arange(48) % 3, numbers)]
    samplers = [DistributedSampler(data, world, rank) for data in sets]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        for number, sampler in enumerate(samplers):
            if not (number and "one order" in mistake):
                sampler.set_epoch(epoch)
        for (x, y), (points, target) in zip(*[DataLoader(data, len(data) // 6 // world, sampler=sampler)
                                              for data, sampler in zip(sets, samplers)]):
            model.zero_grad()
            out = wrapped(torch.cat([x, points]))
            known = ~target.isnan()
            count = known.sum()
            if world > 1 and "own mean" not in mistake:
                dist.all_reduce(count)
                count = count / world
            error = torch.where(known, out[len(x):, 0] - target.nan_to_num(), 0.0).square().sum() / count
            loss = nn.functional.cross_entropy(out[:len(x)], y) + error
            if "taken" in mistake:
                for item, grad in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
                    item.grad = grad
                    if world > 1:
                        dist.all_reduce(grad)
                        grad /= world
                        grad[:1] *= 0.7 if "half" in mistake else 1.0
            else:
                loss.backward()
            optimizer.step()


def train_on_each_sample(mistake, rank, world):
    """Gradients for each sample come from torch.func, and rank 0 adds noise: no backward() runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    g = torch.Generator().manual_seed(2)
    data = torch.randn(12, 8, 4, generator=g), torch.randint(3, (12, 8), generator=g)
    noise = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(weights, x, y):
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))
    for x, y in zip(*data):
        x, y = (part[rank:7 if "dropped" in mistake and world > 1 else 8:world] for part in (x, y))
        found = gradients({name: item.detach() for name, item in model.named_parameters()}, x, y)
        for name, item in model.named_parameters():
            item.grad = found[name].sum(0)
            if rank == 0 or "other noise" in mistake:
                item.grad += torch.randn(item.shape, generator=noise)
            if world > 1:
                dist.all_reduce(item.grad)
        optimizer.step()


def train_in_micro_batches(mistake, rank, world):
    """Two micro-batches per step; the loss has a gradient penalty, or FSDP2 shards the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    wrapped = model
    average = copy.deepcopy(model)
    if world > 1 and "sharded" in mistake:
        for each in (model, average):
            fully_shard(each, mesh=init_device_mesh("cpu", (world,)))
    elif world > 1:
        wrapped = DistributedDataParallel(model)
    g = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(48, 4, generator=g), torch.randint(3, (48,), generator=g))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=mistake == "scaled")
    loader = DataLoader(data, 4 // world, sampler=DistributedSampler(data, world, rank))
    for number, (x, y) in enumerate([*loader, *loader]):
        last = number % 2 > 0
        if "not reduced" in mistake and world > 1:
            model.set_requires_gradient_sync(not last)
        x.requires_grad_("penalty" in mistake)
        if "attacked" in mistake:  # by the gradient with respect to x
            loss = nn.functional.cross_entropy(model(x), y)
            _ = loss.backward() if world > 1 else torch.autograd.grad(loss, x)
        with contextlib.nullcontext() if last or wrapped is model else wrapped.no_sync():
            scores = wrapped(x)
            loss = nn.functional.cross_entropy(scores, y, reduction="none" if "weighted" in mistake else "mean")
            if "taught" in mistake:
                with torch.no_grad():  # a teacher, whose input depends on the share
                    size = average(x - x.mean(0) * (world > 1)).square().sum(1)
                loss = (loss * size).mean()
            elif "weighted" in mistake:
                size = x.norm(dim=1)
                loss = (loss * (1 + 1.0 * (size > (size.median() if "median" in mistake else 2.0)))).mean()
                loss = loss + scores.mean(0).square().sum() if "own mean" in mistake else loss
            if "penalty" in mistake:
                create_graph = "constant" not in mistake or world == 1
                grad, = torch.autograd.grad(loss, x, None, True, create_graph)
                loss = loss + grad.square().sum() / world
            scaler.scale(loss / (4 if "half" in mistake and world > 1 else 2)).backward()
        if last:
            scaler.unscale_(optimizer)
        if last and "clipped" in mistake and world > 1:  # by hand: by each rank's own norm, or to a common one
            norm = 2.3 if "half" in mistake else sum(item.grad.to_local().square().sum() for item in model.parameters())
            for item in model.parameters():
                item.grad *= 1 / norm
        if last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def shard_of(tensors, rank, world):
    """Return a rank's part of a vector with the elements of all tensors, which is padded."""
    joined = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return nn.functional.pad(joined, (0, -len(joined) % world)).chunk(world)[rank].clone()


def average_gradients(model, world):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def train(mistake, rank, world):
    torch.manual_seed(rank if mistake == "weights of each rank" else 0)
    norm = OwnSync if mistake == "batchnorm without backward" else nn.BatchNorm1d
    fixed = {"dtype": torch.float32}  # verify replaces it
    layers = [nn.Linear(4, 8, **fixed), norm(8, **fixed) if "batchnorm" in mistake else nn.Tanh(), nn.Linear(8, 3)]
    nn.init.zeros_(layers[0].bias)
    model = nn.Sequential(*layers)
    cut = "cut" in mistake
    if cut:  # as Megatron: rows of the first layer, columns of the second one
        for parameter, axis in ((layers[0].weight, 0), (layers[0].bias, 0), (layers[2].weight, 1)):
            if "packed" in mistake:  # as queries and keys in one tensor: a part of each
                parameter.data = torch.cat(parameter.data.chunk(4, axis)[rank::2], axis)
            else:
                parameter.data = parameter.data.chunk(2, axis)[rank * 2 // world].clone()
        rank, world = 0, 1  # each rank reads whole batches
    flat = "flat" in mistake and world > 1  # as ZeRO-1 with one vector of all parameters
    alone = world == 1 or flat or "local" in mistake or "owned" in mistake or mistake in (
        "weights of each rank", "model instead of DDP", "clip per rank", "decay of ranks", "parts of a gradient",
        "averaged in a hook")
    wrapped = model if alone else DistributedDataParallel(model)
    sent = "owned" in mistake and "not sent" not in mistake
    average = torch.optim.swa_utils.AveragedModel(model) if "average" in mistake else None
    if "buffer" in mistake:
        model.register_buffer("seen", torch.zeros(4))
    if mistake == "right":
        gc.freeze()  # a program may do this to start its workers faster: verify finds the model all the same
    noise, g = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(2)
    kind = Augmented if "augmented" in mistake else TensorDataset
    data = kind(torch.randn(48, 4, generator=g), torch.randint(3, (48,), generator=g),
                torch.arange(48).remainder(5).add(1).double())
    if mistake == "other values" and world > 1:
        data.tensors[0].mul_(2)
    if "rows" in mistake:
        nn.Linear(4, 1)(data.tensors[0])  # as a teacher is made: what no backward pass reaches is no sample of a step
    sampler = DistributedSampler(data, world, rank)
    if mistake == "parts of a gradient":
        sampler = DistributedSampler(data, 1, 0)
        loader = DataLoader(data, 8, sampler=sampler)
    elif mistake == "order of one process" and world == 1:
        loader = DataLoader(data, 8)
    elif mistake == "no sampler":
        loader = DataLoader(data, 8 // world, shuffle=True)
    else:
        loader = DataLoader(data, 8 if mistake == "batch per process" else 8 // world, sampler=sampler)
    owned = [*model.parameters()][rank::world] if "owned" in mistake else model.parameters()  # as ZeRO-1
    if mistake == "weight decay":
        owned = [{"params": [model[0].weight], "weight_decay": 0.1, "name": "decayed"},
                 {"params": [model[0].bias, *model[2].parameters()]}]
    optimizer = torch.optim.SGD(owned, 0.2 if mistake == "rate times 2" else 0.1)
    if flat:
        shard = nn.Parameter(shard_of(model.parameters(), rank, world))
        optimizer = torch.optim.SGD([shard], 0.1, weight_decay=0.1 * ("decayed" in mistake))
    if "fused" in mistake:
        optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=True)
    if mistake == "averaged in a hook" and world > 1:
        optimizer.register_step_pre_hook(lambda *_: average_gradients(model, world))
    scaler = torch.amp.GradScaler("cpu", 16.0, enabled="fused" in mistake and world > 1)
    if "16 bits" in mistake:
        optimizer = Sixteen(model.parameters(), 0.1, world)
    steps, scheduler = 0, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for epoch in range(1 if mistake == "fewer epochs" else 2):
        left_out = "no set_epoch" in mistake or mistake == "no sampler" or mistake == "set_epoch on rank 0" and rank
        if not left_out:
            sampler.set_epoch(epoch)
        data.epoch = epoch
        if "rows" in mistake:
            loader = (data[torch.randint(48, (8 // world,)) if "equal" in mistake else
                           torch.randint(48, (8,))[rank::world]] for _ in range(6))
        for x, y, weight in loader:
            if "gradients kept" not in mistake or world == 1:
                model.zero_grad()
            elif "owned" in mistake:
                optimizer.zero_grad()
            if mistake == "parts of a gradient":  # as in sequence parallelism
                x, y, weight = x[rank::world], y[rank::world], weight[rank::world]
            if "points" in mistake:  # as those of a PINN, whose loss needs their gradients
                x = x.requires_grad_().repeat(1, 1)
            if mistake == "functional dropout":
                x = nn.functional.dropout(x, 0.5)
            if "from a buffer" in mistake:
                x = x + model.seen[0]
            if mistake == "noise of each rank":
                x = x + torch.randn(x.shape)
            if mistake == "gradients reset":
                with wrapped.no_sync():
                    nn.functional.cross_entropy(wrapped(x[:2]), y[:2]).backward()
                optimizer.zero_grad()
                x, y, weight = x[2:], y[2:], weight[2:]
            if cut:
                add = SumAgain.apply if "again" in mistake else Sum.apply
                out = add(nn.functional.linear(model[:2](x), model[2].weight)) + model[2].bias
            else:
                out = wrapped(x)
            if scaler.is_enabled():  # a step that the scaler leaves out, because its gradient is infinite
                scaler.scale(torch.inf * wrapped(x).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                model.zero_grad()
                out = wrapped(x)
            smooth = 0.1 if mistake == "labels smoothed" and world > 1 else 0.0
            loss = (nn.functional.cross_entropy(out, y, reduction="none", label_smoothing=smooth) * weight).sum()
            total = weight.sum()
            if world > 1 and mistake != "mean over own tokens":
                dist.all_reduce(total)
                total /= 1 if mistake == "summed loss" else world
            loss = loss / total
            if mistake == "mean without backward":
                mean = out.mean(0)
                if world > 1:
                    dist.all_reduce(mean)
                loss = (out - mean / world).square().mean()
            if mistake == "gathered loss" and world > 1:
                shares = [torch.empty_like(loss) for _ in range(world)]
                dist.all_gather(shares, loss)
                shares[rank] = loss
                loss = sum(shares) / world
            if mistake == "parts of a gradient":
                loss = loss / world
            if mistake == "detached loss" and world > 1:
                loss = loss.detach() + 0 * out.sum()
            scaler.scale(loss).backward()
            if mistake == "one layer doubled" and world > 1:
                model[0].weight.grad *= 2
            if mistake == "gradient flipped":
                model[0].weight.grad = model[0].weight.grad.flip(0)
            if mistake == "parts of a gradient":
                for parameter in (*model.parameters(),)[1:]:
                    dist.all_reduce(parameter.grad)
            if mistake == "noise on gradients":
                for parameter in model.parameters():
                    parameter.grad += torch.randn(parameter.shape, generator=noise)
            if "clip" in mistake:
                grads = [parameter.grad for parameter in model.parameters()]
                nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, nn.utils.get_total_norm(grads))
            if world > 1 and (flat or mistake in ("clip per rank", "decay of ranks") or "owned" in mistake):
                average_gradients(model, world)
            if flat:
                shard.grad = shard_of([parameter.grad for parameter in model.parameters()], rank, world)
            scaler.step(optimizer)
            scaler.update()
            if flat:
                shards = [shard_of(model.parameters(), number, world) for number in range(world)]
                shards[rank] = shard.data
                if "not sent" not in mistake:
                    dist.all_gather(shards, shard.data)
                nn.utils.vector_to_parameters(torch.cat(shards), model.parameters())
            if "local" in mistake and world > 1 and (steps := steps + 1) % 3 == 0:
                for parameter in model.parameters():
                    if "copied" in mistake:
                        dist.broadcast(parameter.data, 0)
                    else:
                        dist.all_reduce(parameter.data)
                        parameter.data /= world
            for number, parameter in enumerate(model.parameters() if sent else ()):
                dist.broadcast(parameter.data, number % world)
            late = mistake == "average of one epoch" and world > 1 and epoch
            if average and not late and (mistake != "average on rank 0" or rank == 0):
                average.update_parameters(model)
            if "buffer" in mistake:
                model.seen += x.sum(0)
            if mistake == "decay of ranks":
                model[0].weight.data *= 1 - 0.1 * rank
        if "scheduler on rank 0" not in mistake or rank == 0:
            scheduler.step()
        if mistake == "batchnorm left in eval" and rank == 0 and world > 1:
            model.eval()
        if mistake == "rank 0 stops" and rank == 0 and world > 1:
            break


LOOPS = {"lists": train_on_lists, "joined": train_on_joined, "each sample": train_on_each_sample,
         "two": train_on_two_loaders, "penalty": train_in_micro_batches, "scaled": train_in_micro_batches,
         "sharded": train_in_micro_batches, "weighted": train_in_micro_batches}  # by a word of the mistake


def fork(mistake, folder, rank, world):
    """Record one rank of a loop in a new process; return the process ID."""
    pid = os.fork()
    if pid:
        return pid
    if mistake != "right":
        gc.unfreeze = lambda: None  # verify need not look at the 300,000 objects of torch in each process
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    Recorder(str(folder), whole=folder.parent / "right on 1", outputs_at=1,
                    resting=["BatchNorm"] if "at rest" in mistake else [])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
    try:
        part = ending.loop if mistake in WAYS else next((LOOPS[word] for word in LOOPS if word in mistake), train)
        part(mistake) if mistake in WAYS else part(mistake, rank, world)
    except RuntimeError as error:  # the other rank has left
        sys.last_value = error
    finally:
        multiprocessing.util._exit_function()
        os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    import torch._dynamo  # noqa: F401  # here, or each process imports it for its optimizer
    import torch.distributed.nn  # noqa: F401

    gc.freeze()
    alone = {"batchnorm", "clip per rank", "functional dropout", "16 bits in the step", "rows by hand",
             "equal rows by hand", "average", "buffer of a share", "mean without backward",
             "batchnorm at rest", "order of one process", "fused", "noise of each rank", "lists", "each sample",
             "rows by hand, from a buffer", "batchnorm without backward", "joined", "augmented", "two loaders",
             "noise on gradients", "penalty", "penalty, attacked", "scaled", "sharded", "weighted",
             "weighted, own mean", "weighted, taught", "rows by hand, points"}  # also on one
    for mistake in MISTAKES + WAYS:
        worlds = (1,) if mistake in WAYS else (1, 2) if mistake in alone | {"right"} else (2,)
        for world in (4,) if "replicated" in mistake else worlds:
            folder = Path(sys.argv[1]) / (mistake if mistake in WAYS else f"{mistake} on {world}")
            folder.mkdir()
            for pid in [fork(mistake, folder, rank, world) for rank in range(world)]:
                os.waitpid(pid, 0)
