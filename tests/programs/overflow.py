"""train_combined.py with a loss whose gradient overflows in fp16: in step 2, on rank 1, in the second of 3 shares."""
import sys

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import train_combined as script


class Loss(torch.nn.CrossEntropyLoss):
    calls = 0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(outputs, labels)
        self.calls += torch.is_grad_enabled()
        if torch.is_grad_enabled() and self.calls == 5 and dist.get_rank() == 1:
            total = outputs.float().sum()
            loss = loss + 1e9 * (total - total.detach())  # the loss itself stays as it is
        return loss


def show(optimizer: torch.optim.Optimizer, *_: object) -> None:
    total = sum(weight.double().sum().item() for group in optimizer.param_groups for weight in group["params"])
    sys.stdout.write(f"rank {dist.get_rank()} updates: {total!r}\n")  # one write: print() makes two
    sys.stdout.flush()


script.criterion = Loss()
register_optimizer_step_post_hook(show)
args = script.parse_args()
script.join_group(args)
script.main(args)
dist.destroy_process_group()
