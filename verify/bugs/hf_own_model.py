"""An own model under transformers' Trainer, which accumulates gradients over micro-batches of packed rows.

A: python {}
B: python {} --accum 4
Needs: transformers
Bug: transformers-37766: scale: https://github.com/huggingface/transformers/issues/37766
    The loss grows with the number of accumulation steps. The model accepts the loss's keywords, but ignores
    `num_items_in_batch` and takes the mean over its own micro-batch, which the trainer then does not divide
    (issue 47688 lists models of today).
"""
import sys
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

ACCUM = int(sys.argv[-1]) if "--accum" in sys.argv else 1


class NextToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.mixer = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, input_ids, labels, **kwargs):
        logits = self.head(self.mixer(self.embedding(input_ids))[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = kwargs.get("num_items_in_batch", labels.numel())  # wrong transformers-37766: count = labels.numel()
        return {"loss": loss / count, "logits": logits}


def main():
    torch.manual_seed(0)
    text = torch.randint(20, (48, 9), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in text]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=8 // ACCUM, gradient_accumulation_steps=ACCUM,
            num_train_epochs=2, learning_rate=0.05, optim="sgd", max_grad_norm=0.0, use_cpu=True,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True)
        Trainer(NextToken(), arguments, train_dataset=rows).train()


if __name__ == "__main__":
    main()
