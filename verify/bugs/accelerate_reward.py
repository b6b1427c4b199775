"""A reward model on pairs of answers, with Accelerate, in the style of trl's trainers; it prints an evaluation.

A: python {}
B: torchrun --nproc-per-node=2 {}
Needs: accelerate
Bug: cira-diff-1: no-backward|no-gradient: https://github.com/dopplerchase/cira-diff/pull/1
    The loss is the same on all ranks and the gradients are zero, because the loop gathers the loss before it calls
    `backward`, and gathering has no backward pass. (Without `requires_grad_`, `backward` would raise an error.)
Bug: trl-7010: metric: https://github.com/huggingface/trl/issues/7010
    An evaluation metric is off on the last batch: each rank takes a mean before `gather_for_metrics`, which can then
    no longer remove the example that pads the last batch.
"""
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader, TensorDataset


def make_pairs(count, seed):
    better = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(better + 0.3, better.roll(1, 0))


def losses_of(model, chosen, rejected):
    return -logsigmoid(model(chosen) - model(rejected)).squeeze(1)


def evaluate(accelerator, model, loader):
    model.eval()
    losses = []
    with torch.no_grad():
        for chosen, rejected in loader:
            part = losses_of(model, chosen, rejected)
            losses.append(accelerator.gather_for_metrics(part))
            # wrong trl-7010: losses[-1] = accelerator.gather_for_metrics(part.mean()).reshape(-1)
    accelerator.print(f"eval_loss: {torch.cat(losses).mean().item():.6f}")
    model.train()


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    share = accelerator.num_processes
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train_loader = DataLoader(make_pairs(40, 1), 8 // share, shuffle=True)
    eval_loader = DataLoader(make_pairs(9, 2), 10 // share)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    for _ in range(3):
        for chosen, rejected in train_loader:
            with accelerator.accumulate(model):
                loss = losses_of(model, chosen, rejected).mean()
                # wrong cira-diff-1: loss = accelerator.gather(loss).mean().requires_grad_()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        evaluate(accelerator, model, eval_loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
