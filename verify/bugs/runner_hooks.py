"""An image classifier with BatchNorm under a runner with hooks, which evaluates each epoch, in mmdetection's style.

A: torchrun --nproc-per-node=2 {} --evaluate whole
B: torchrun --nproc-per-node=2 {} --evaluate split
Bug: mmdetection-4582: metric|buffers: https://github.com/open-mmlab/mmdetection/pull/4582
    The score in the log of the training differs from the score that a test of the saved checkpoint gives. The ranks
    evaluate with different statistics of BatchNorm, and the checkpoint holds those of rank 0. A evaluates on rank 0
    alone, as the test of a checkpoint does.
"""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EvalHook:
    def __init__(self, images, labels, whole):
        self.images, self.labels, self.whole = images, labels, whole

    def broadcast_bn_buffers(self, model):
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                dist.broadcast(module.running_mean, 0)
                dist.broadcast(module.running_var, 0)

    def after_train_epoch(self, runner):
        self.broadcast_bn_buffers(runner.model)  # wrong mmdetection-4582:
        rank, world = dist.get_rank(), dist.get_world_size()
        rows = slice(rank, None, world) if not self.whole else slice(0, None if rank == 0 else 0)
        network = runner.model.module.eval()
        with torch.no_grad():
            logits, labels = network(self.images[rows]), self.labels[rows]
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        sums = torch.stack([loss, (logits.argmax(1) == labels).sum().to(loss), torch.tensor(len(labels)).to(loss)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"val_loss {sums[0] / sums[2]:.6f} accuracy {sums[1] / sums[2]:.4f}")
        network.train()


class SamplerHook:
    def before_train_epoch(self, runner):
        runner.loader.sampler.set_epoch(runner.epoch)


class OptimizerHook:
    def after_train_iter(self, runner):
        runner.optimizer.zero_grad()
        runner.loss.backward()
        nn.utils.clip_grad_norm_(runner.model.parameters(), 35)
        runner.optimizer.step()


class Runner:
    def __init__(self, model, loader, optimizer, hooks):
        self.model, self.loader, self.optimizer, self.hooks, self.epoch = model, loader, optimizer, hooks, 0

    def call(self, place):
        for hook in self.hooks:
            getattr(hook, place, lambda runner: None)(self)

    def run(self, epochs):
        while self.epoch < epochs:
            self.call("before_train_epoch")
            for images, labels in self.loader:
                self.loss = nn.functional.cross_entropy(self.model(images), labels)
                self.call("after_train_iter")
            self.call("after_train_epoch")
            self.epoch += 1


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(60, 3, 6, 6) * torch.linspace(0.2, 3, 60)[:, None, None, None]
    labels = (images[:, 0].mean((1, 2)) > 0).long()
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                            nn.Linear(6, 2))
    model = DistributedDataParallel(network)
    train_set = TensorDataset(images[:40], labels[:40])
    loader = DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    evaluation = EvalHook(images[40:], labels[40:], whole=sys.argv[-1] == "whole")
    Runner(model, loader, optimizer, [SamplerHook(), OptimizerHook(), evaluation]).run(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
