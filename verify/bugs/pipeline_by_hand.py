"""Two pipeline stages with tied embeddings, each on two data parallel ranks that share the optimizer's states.

    A: python {}
    B: torchrun --nproc-per-node=4 {}
    Bug: torchtitan-596: clip: https://github.com/pytorch/torchtitan/issues/596
        Each stage clipped by the norm of its own gradients, so that the whole model was clipped too little, and its
        stages by different factors.
    Bug: megatron-844: not-averaged|partial: https://github.com/NVIDIA/Megatron-LM/issues/844
        With the distributed optimizer, gradients were reduced to the rank that updates the weight before those of the
        two copies of the embedding were added. The ranks that update the copies differ, so the sums were partial.
"""
import os

import torch
import torch.distributed as dist
from torch import nn

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
STAGES, COPIES = (2, WORLD // 2) if WORLD > 1 else (1, 1)
STAGE, COPY = RANK // COPIES, RANK % COPIES  # ranks 0 and 1 hold stage 0
FIRST, LAST = STAGE == 0, STAGE == STAGES - 1
WORDS, WIDTH, LENGTH, MICRO_BATCHES = 20, 12, 7, 2


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        embedding = nn.Parameter(torch.randn(WORDS, WIDTH))
        layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        if FIRST:
            self.embedding = embedding
        self.layers = nn.ModuleList(layers[STAGE * 4 // STAGES:(STAGE + 1) * 4 // STAGES])
        if LAST:
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = embedding  # a copy, where the first stage is another process

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

    def tied(self):
        return self.embedding if FIRST else self.head.weight


class Pipeline:
    def __init__(self, stage):
        self.stage, self.weights = stage, list(stage.parameters())
        data_groups = [dist.new_group([n * COPIES + c for c in range(COPIES)]) for n in range(STAGES) if WORLD > 1]
        tied_groups = [dist.new_group([c, (STAGES - 1) * COPIES + c]) for c in range(COPIES) if WORLD > 1]
        self.data, self.ends = (data_groups[STAGE], tied_groups[COPY]) if WORLD > 1 else (None, None)
        half = -(-len(self.weights) // COPIES)
        self.owners = [number // half for number in range(len(self.weights))]
        self.mine = [weight for weight, owner in zip(self.weights, self.owners) if owner == COPY]
        self.optimizer = torch.optim.AdamW(self.mine, 0.02, weight_decay=0.1)

    def forward_backward(self, all_ids, all_targets):
        kept = []
        for ids, targets in zip(all_ids.chunk(MICRO_BATCHES), all_targets.chunk(MICRO_BATCHES)):
            if FIRST:
                x = self.stage.embedding[ids]
            else:
                x = torch.empty(*ids.shape, WIDTH, dtype=self.weights[0].dtype)
                dist.recv(x, RANK - COPIES)
                x.requires_grad_()
            y = self.stage(x)
            if LAST:
                logits = self.stage.head(y).flatten(0, 1)
                y = nn.functional.cross_entropy(logits, targets.flatten()) / MICRO_BATCHES
            else:
                dist.send(y.detach(), RANK + COPIES)
            kept.append((x, y))
        for x, y in kept:
            if LAST:
                y.backward()
            else:
                grad = torch.empty_like(y)
                dist.recv(grad, RANK + COPIES)
                y.backward(grad)
            if not FIRST:
                dist.send(x.grad, RANK - COPIES)

    def add_tied_gradients(self):
        if STAGES > 1:
            dist.all_reduce(self.stage.tied().grad, group=self.ends)

    def reduce_to_owners(self):
        for weight, owner in zip(self.weights, self.owners):
            total = weight.grad.clone()
            if COPIES > 1:
                dist.all_reduce(total, group=self.data)
            if owner == COPY:
                weight.grad = total / COPIES

    def clip(self, limit):
        counted = [weight for weight in self.mine if FIRST or weight is not self.stage.tied()]
        norm = sum((weight.grad.square().sum() for weight in counted), torch.zeros(()))
        if WORLD > 1:
            dist.all_reduce(norm)  # wrong torchtitan-596: dist.all_reduce(norm, group=self.data)
        for weight in self.mine:
            weight.grad *= (limit / norm.sqrt()).clamp(max=1)

    def step(self):
        self.add_tied_gradients()  # wrong megatron-844:
        self.reduce_to_owners()
        # wrong megatron-844: self.add_tied_gradients()
        self.clip(0.1)
        self.optimizer.step()
        for weight, owner in zip(self.weights, self.owners) if COPIES > 1 else ():
            dist.broadcast(weight.data, STAGE * COPIES + owner, group=self.data)


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(5)
pipeline = Pipeline(Stage())
texts = torch.randint(WORDS, (4, 8, LENGTH + 1), generator=torch.Generator().manual_seed(0))
for step in range(12):
    text = texts[step % 4].chunk(COPIES)[COPY]
    pipeline.stage.zero_grad()
    pipeline.forward_backward(text[:, :-1], text[:, 1:])
    pipeline.step()
if WORLD > 1:
    dist.destroy_process_group()
