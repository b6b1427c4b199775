"""Dropout, which no network here has: its masks follow from seed, epoch, step and rank."""
import re

import pytest
from conftest import TORCHRUN, copy_out, good, run

# A network of the user's own, at the end of common/models.py: it says which outputs its dropout keeps. torchrun starts
# `python -u`, where print writes the end of a line separately, and lines of two ranks would mix.
WITH_DROPOUT = """

class Dropout(nn.Dropout):
    def forward(self, inputs):
        kept = super().forward(torch.ones_like(inputs))
        if self.training:
            print(f"kept {dist.get_rank()} {zlib.crc32(kept.numpy().tobytes())}\\n", end="")
        return inputs * kept


def create_model(name, num_classes, image_shape):
    model = CNN(num_classes, image_shape)
    model.hidden.append(Dropout())
    return model
"""


@pytest.mark.parametrize("script", ["train_DDP.py", pytest.param("train_elastic.py", marks=pytest.mark.drill)])
def test_dropout_differs_between_ranks_steps_and_epochs_and_a_resumed_run_repeats_it(tmp_path, script):
    copy = copy_out(script, tmp_path / "copy")
    models = copy.parent / "common/models.py"
    imports = "import zlib\nimport torch\nimport torch.distributed as dist\n"
    models.write_text(imports + models.read_text() + WITH_DROPOUT)
    command = [*TORCHRUN, "--nproc-per-node=2", script, "--batch-size", "478", "--save-every", "1", "--workers", "0"]

    def kept(*more):
        out = good(run(*command, "--epochs", "2", *more, cwd=copy.parent)).out
        return {rank: re.findall(rf"kept {rank} (\d+)", out) for rank in "01"}

    whole = kept()
    assert [len(masks) for masks in whole.values()] == [6, 6]  # three steps in each epoch
    assert len({*whole["0"], *whole["1"]}) == 12
    assert kept("--resume", "runs/epoch-001.pt") == {rank: masks[3:] for rank, masks in whole.items()}
