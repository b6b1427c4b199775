"""A decoder under tensor parallelism on DTensor, in the style of chapter 6 of LambdaLabs' training guide.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: lambdalabs-40: set-epoch: https://github.com/LambdaLabsML/distributed-training-guide/issues/40
    The sampler of the data-parallel ranks shuffles, but the loop over epochs never calls `set_epoch`.
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

WIDTH, HEADS, VOCABULARY = 16, 4, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return self.head(self.norm(x))


def parallelize(model, mesh):
    gather = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"embed": tp.ColwiseParallel(output_layouts=Shard(1)), "attention": gather, "mlp": gather,
            "attention.o": tp.RowwiseParallel(output_layouts=Shard(1)),
            "mlp.up": tp.ColwiseParallel(), "mlp.down": tp.RowwiseParallel(output_layouts=Shard(1)),
            "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    plan |= {f"attention.{name}": tp.ColwiseParallel() for name in "qkv"}
    plan |= {name: tp.SequenceParallel() for name in ("attention_norm", "mlp_norm", "norm")}
    tp.parallelize_module(model, mesh, plan)


def main():
    torch.manual_seed(0)
    model = Decoder()
    texts = TensorDataset(torch.randint(VOCABULARY, (32, 9), generator=torch.Generator().manual_seed(1)))
    if "RANK" in os.environ:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh["tp"])
        sampler = DistributedSampler(texts, mesh["dp"].size(), mesh["dp"].get_local_rank(), drop_last=True)
    else:
        sampler = RandomSampler(texts, generator=torch.Generator())
    loader = DataLoader(texts, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=1e-4)
    for epoch in range(3):
        if "RANK" in os.environ:
            sampler.set_epoch(epoch)  # wrong lambdalabs-40: pass
        else:
            sampler.generator.manual_seed(epoch)
        for (tokens,) in loader:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
