"""A text classifier under a Trainer with arguments, optimizer and schedule, in the style of transformers 2.9.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: transformers-4398: set-epoch: https://github.com/huggingface/transformers/issues/4398
    Every epoch of a distributed run has the same order, because the trainer never calls `sampler.set_epoch`.
"""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset


@dataclass
class TrainingArguments:
    train_batch_size: int = 8
    num_train_epochs: int = 3
    learning_rate: float = 0.02
    warmup_steps: int = 4
    max_grad_norm: float = 1.0
    local_rank: int = int(os.environ.get("LOCAL_RANK", -1))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 12)
        self.head = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        return nn.functional.cross_entropy(logits, labels), logits


class Trainer:
    def __init__(self, model, args, train_dataset):
        self.model, self.args, self.train_dataset = model, args, train_dataset

    def get_train_dataloader(self):
        if self.args.local_rank == -1:
            sampler, share = RandomSampler(self.train_dataset, generator=torch.Generator()), 1
        else:
            sampler, share = DistributedSampler(self.train_dataset), dist.get_world_size()
        return DataLoader(self.train_dataset, self.args.train_batch_size // share, sampler=sampler)

    def get_optimizers(self, steps):
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, self.args.learning_rate)
        warmup = self.args.warmup_steps
        return optimizer, torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup)))

    def train(self):
        loader = self.get_train_dataloader()
        optimizer, scheduler = self.get_optimizers(len(loader) * self.args.num_train_epochs)
        model = self.model
        if self.args.local_rank != -1:
            model = DistributedDataParallel(model)
        for epoch in range(self.args.num_train_epochs):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)  # wrong transformers-4398: pass
            else:
                loader.sampler.generator.manual_seed(epoch)
            for input_ids, labels in loader:
                model.train()
                loss = model(input_ids, labels)[0]
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                model.zero_grad()


if __name__ == "__main__":
    arguments = TrainingArguments()
    if arguments.local_rank != -1:
        dist.init_process_group("gloo")
    torch.manual_seed(42)
    texts = torch.randint(50, (48, 6))
    Trainer(Classifier(), arguments, TensorDataset(texts, texts.sum(1) % 3)).train()
    if dist.is_initialized():
        dist.destroy_process_group()
