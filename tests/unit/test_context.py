"""Context parallelism: the parts of a sequence, computed one by one, give the result of the whole sequence."""
import pytest
import torch

from language import context, gpt


@pytest.mark.parametrize("end", [None, 0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_part_attends_as_in_the_whole_sequence(size, end):
    torch.manual_seed(0)
    model, tokens = gpt.GPT(gpt.Size(16, 1, 4, 2, 24), 64, end), torch.randint(4, (2, 12))
    q, k, v = (torch.randn(2, heads, 12, 4, dtype=torch.float64) for heads in (4, 2, 2))
    turns, mask, _ = model.around(tokens)
    keys = gpt.rotate(k, turns)
    whole = gpt.attend(gpt.rotate(q, turns), keys, v, mask)
    for rank, model.positions in enumerate(context.order(12, size, torch.device("cpu"))):
        own, rows, _ = model.around(tokens)
        part = context.attend(gpt.rotate(q[:, :, model.positions], own), keys, v, rows, rank, size)
        torch.testing.assert_close(part, whole[:, :, model.positions])
