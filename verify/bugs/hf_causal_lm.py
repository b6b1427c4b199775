"""A tiny GPT-2 under transformers' Trainer, on rows with different numbers of labels.

A: python {}
B: torchrun --nproc-per-node=2 {}
Needs: transformers
Bug: transformers-39392: uneven-mean: https://github.com/huggingface/transformers/issues/39392
    By default each device divided by its own number of tokens, so a device with few labels had as much weight as one
    with many. The option that sums the number over devices existed, but was off.
"""
import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH = 12


def rows():
    generator = torch.Generator().manual_seed(3)
    for _ in range(48):
        tokens = torch.randint(20, (LENGTH,), generator=generator)
        keep = int(torch.randint(3, LENGTH, (), generator=generator))
        yield {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH) >= keep, -100)}


def main():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=20, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)),
            num_train_epochs=2,
            learning_rate=1e-2,
            average_tokens_across_devices=True,  # wrong transformers-39392: average_tokens_across_devices=False,
            use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=1)
        Trainer(model, arguments, train_dataset=list(rows())).train()


if __name__ == "__main__":
    main()
