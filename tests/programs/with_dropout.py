"""A program around a script, whose network gets a dropout layer that prints which outputs it keeps.

    PYTHONPATH=. torchrun --nproc-per-node=2 tests/programs/with_dropout.py train_DDP.py
"""
import zlib

import torch
import torch.distributed as dist
from around import run_script

from common import models


class Dropout(torch.nn.Dropout):
    def forward(self, inputs):
        kept = super().forward(torch.ones_like(inputs))
        if self.training:
            # torchrun starts `python -u`: print would write the end of the line separately, and lines would mix
            print(f"kept {dist.get_rank()} {zlib.crc32(kept.numpy().tobytes())}\n", end="")
        return inputs * kept


def create_model(name, num_classes, image_shape, create=models.create_model):
    model = create(name, num_classes, image_shape)
    (model.hidden if name == "cnn" else model.blocks).append(Dropout())
    return model


models.create_model = create_model
run_script()
