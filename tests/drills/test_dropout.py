"""Dropout, which no network here uses: its masks depend on seed, epoch, step and rank."""
import re

import pytest
from conftest import FROM_ROOT, PROGRAMS, PYTHON, TORCHRUN, good, run

TWO = [*TORCHRUN, "--nproc-per-node=2"]


@pytest.mark.parametrize(("script", "again"), [
    # one process with rank 0's share of the batch takes rank 0's masks, in twice as many steps
    ("train_DDP.py", [PYTHON]), pytest.param("train_elastic.py", TWO, marks=pytest.mark.nightly)])
def test_dropout_differs_between_ranks_steps_and_epochs_and_a_resumed_run_repeats_it(tmp_path, script, again):
    def kept(launcher, batch_size, *more):
        out = good(run(*launcher, PROGRAMS / "with_dropout.py", script, "--batch-size", batch_size, "--epochs", "2",
                       "--save-every", "1", "--workers", "0", "--output-dir", tmp_path, *more, env=FROM_ROOT)).out
        return {rank: re.findall(rf"kept {rank} (\d+)", out) for rank in "01"}

    whole = kept(TWO, 478)
    assert [len(masks) for masks in whole.values()] == [6, 6]  # three steps in each epoch
    assert len({*whole["0"], *whole["1"]}) == 12
    rest = kept(again, 478 if again is TWO else 239, "--resume", tmp_path / "epoch-001.pt")
    assert rest["0"][:3] == whole["0"][3:]
    assert rest["1"] == (whole["1"][3:] if again is TWO else [])
