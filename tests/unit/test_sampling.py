"""Which answers are drawn, what they are worth, and what the loss of GRPO says about them."""
import json
import math

import pytest
import torch

from common import loading
from common.errors import UsageError
from language import gpt, pairs, sampling

ROWS = [{"prompt": prompt, "goal": number} for number, prompt in enumerate(["ab", "b", "xyz+", "longest?", "c"])]


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Size(16, 2, 4, 2, 24), 256).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def read(folder, rows=ROWS, length=32, count=None, too_long="drop", vocabulary=None, settings=(7, 3, 1.5, 4)):
    """Return the prompts of a file with these rows and a last one for validation."""
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"prompt": "v"}])))
    return sampling.create_datasets("chat", str(folder / "chat.jsonl"), None, length, count, too_long, vocabulary,
                                    settings)


def draw(model, prompts, numbers):
    inputs, numbers = prompts.__getitems__(numbers)
    return sampling.draw(model, prompts, inputs, numbers)


def test_an_answer_is_drawn_from_the_model_with_its_own_random_numbers(model, tmp_path):
    """Each is computed here alone, without padding and from the whole text; tokens follow from the numbers' places."""
    train, val = read(tmp_path)
    train.set_epoch(2)
    inputs, targets, old = draw(model, train, [3, 0, 4])
    assert [row["goal"] for row in train.rows] != list(range(5)) and len(val) == 1  # shuffled
    for row, (number, member) in enumerate((number, member) for number in (3, 0, 4) for member in range(3)):
        tokens = list(train.rows[number]["prompt"].encode())
        generator = torch.Generator().manual_seed(loading.seed(4, 2, number, member))
        counted = targets[row] != pairs.IGNORED
        assert counted.sum() == 7 and counted[-8:-1].all()
        for place in torch.rand(7, generator=generator, dtype=torch.float64):
            logits = model(torch.tensor([tokens]))[0, -1] / 1.5
            tokens.append(int((logits.softmax(0).cumsum(0) <= place).sum()))
        assert targets[row][counted].tolist() == tokens[-7:] == inputs[row, 0, -7:].tolist()
        wanted = (model(torch.tensor([tokens]))[0, -8:-1] / 1.5).log_softmax(1)[range(7), tokens[-7:]]
        torch.testing.assert_close(old[row][counted], wanted, rtol=0, atol=1e-12)
        assert (old[row][~counted] == 0).all()
    new = sampling.log_probs(model(inputs), targets, 1.5)
    assert (new - old).abs().max() < 1e-12  # the script compares these, too
    train.set_epoch(3)
    assert not torch.equal(draw(model, train, [3])[1], targets[:3])


def test_an_answer_does_not_depend_on_its_batch(model, tmp_path):
    train, _ = read(tmp_path)
    everything = draw(model, train, range(5))
    for number in range(5):
        for part, whole in zip(draw(model, train, [number]), everything):
            torch.testing.assert_close(part, whole[number * 3:number * 3 + 3], rtol=0, atol=1e-12)
    answers = everything[1][:, -8:-1].tolist()
    assert len({tuple(answer) for answer in answers}) == 15


def test_an_answer_ends_with_the_end_token_which_counts(model, tmp_path):
    train, _ = read(tmp_path)
    whole = draw(model, train, range(5))[1][:, -8:-1].tolist()
    train.coder.end_token = end = whole[4][2]
    inputs, targets, old = draw(model, train, range(5))
    for tokens, row, log_probs, entered in zip(whole, targets, old, inputs):
        length = tokens.index(end) + 1 if end in tokens else 7
        expected = tokens[:length] + [pairs.IGNORED] * (7 - length)
        assert row[-8:-1].tolist() == expected and ((log_probs < 0) == (row != pairs.IGNORED)).all()
        assert entered[0, -7:].tolist() == tokens[:length] + [0] * (7 - length)
    assert (targets == pairs.IGNORED).sum() > (draw(model, train, [0])[1] == pairs.IGNORED).sum()
    assert pairs.count(targets[4]) == 3
    seen = []
    found = sampling.rewards(lambda row, text: (seen.append((row["goal"], text)), len(text))[1], train, torch.arange(5),
                             targets)
    assert found.shape == (5, 3) and [goal for goal, _ in seen[::3]] == [row["goal"] for row in train.rows]
    assert seen[4][1] == train.coder.decode(whole[4][:2]) and found[1, 1] == len(seen[4][1])


def test_a_reward_gets_the_space_with_which_an_answer_begins(tmp_path):
    """A Llama's tokenizer drops the first space of a text that it decodes."""
    class Strips(pairs.Bytes):
        def decode(self, tokens):
            return super().decode(tokens).removeprefix(" ")

    train, _ = read(tmp_path, settings=(7, 1, 1.0, 0))
    train.coder, seen = Strips(), []
    targets = torch.full((5, train.inputs.shape[2]), pairs.IGNORED)
    targets[:, -8:-5] = torch.tensor([*b" 4\0"])
    sampling.rewards(lambda row, text: seen.append(text) or 0.0, train, torch.arange(5), targets)
    assert seen == [" 4"] * 5


def test_sampling_stops_when_all_answers_have_ended(model, tmp_path):
    train, _ = read(tmp_path, settings=(20, 1, 1.0, 0))
    train.coder.end_token = int(draw(model, train, [0])[1][0, -21])  # the first token
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert pairs.count(draw(model, train, [0])[1]) == 1 and len(calls) == 1
    assert model.positions is None and model.attend is gpt.attend


def test_the_loss_is_ppos_and_counts_tokens(model):
    """The ratio 1.5 is cut to 1.2 and 0.5 to 0.8 only where that makes the loss greater."""
    new = torch.tensor([[1.5, 0.5, 1.1], [1.5, 0.5, 9.0]], dtype=torch.float64).log().requires_grad_()
    targets = torch.tensor([[5, 6, 7], [5, 6, pairs.IGNORED]])
    loss = sampling.loss(new, targets, torch.zeros_like(new), torch.tensor([2.0, -3.0]).double(), 0.2)
    assert loss.item() == pytest.approx(-(2 * (1.2 + 0.5 + 1.1) - 3 * (1.5 + 0.8)))
    loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[0, -1.0, -2.2], [4.5, 0, 0]]).double())


def test_advantages_are_those_within_a_group():
    found = sampling.advantages(torch.tensor([[0.0, 1, 1, 0], [0.3, 0.3, 0.3, 0.3], [5, 5, 5, 9]]).double())
    expected = [-1, 1, 1, -1, 0, 0, 0, 0, *[-1 / math.sqrt(3)] * 3, math.sqrt(3)]
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=3e-4, atol=1e-9)


def test_the_measures_are_sums_over_answers():
    rewards = torch.tensor([[0.0, 1], [0.25, 0.25], [1, 1]])
    targets = torch.tensor([[1, 2], [3, pairs.IGNORED]] * 3)
    loss, *totals, count = sampling.measure(rewards, targets).tolist()
    means = {name: total / count for name, total in zip(sampling.METRICS, totals)}
    assert count == 6 and loss == -3.5 and means == pytest.approx(
        {"reward": 3.5 / 6, "full": 0.5, "spread": 0.5 / 3, "alike": 2 / 3, "tokens": 1.5})


PROMPT = 'def name(a):\n    """What it does."""\n'


@pytest.mark.parametrize(("answer", "worth"), [
    ("    return a\n", 1), ("    if a:\n        a += 1\n    return a", 1), ("", 0), ("\n\n", 0), ("    pass\n", 0),
    ("    ...\n", 0), ("    'a text'\n", 0), ("    pass\n    return\n", 1), ("    return a\n    return (\n", 0.25),
    ("    b = 1\n    b\n    c c\n    d\n", 0.25), ("   return a\n", 0), ("    return a\n  b\n\n\n", 0.125),
    ("    a = '\N{REPLACEMENT CHARACTER}'\n", 1), ("    a = \N{REPLACEMENT CHARACTER}\n", 0), ("    a = '\\d'\n", 1),
    ("    \0\n", 0), ("    return " + "(" * 300 + "a" + ")" * 300, 0), ("    True\n", 0), ("    return True\n", 1)])
def test_a_reward_is_how_much_of_an_answer_parses(answer, worth, recwarn):
    assert sampling.parses({"prompt": PROMPT}, answer) == worth and not recwarn.list


def test_an_answer_in_a_chat_is_read_without_its_prompt():
    assert sampling.parses({"prompt": [{"role": "user", "content": "Write code."}]}, "a = 1\n") == 1


def test_prompts_end_in_one_column_before_the_room_for_answers(tmp_path):
    train, val = read(tmp_path, length=14)
    assert train.describe() == "4 prompts (1 longer ones dropped)" and len(train) == 4
    for number, row in enumerate(train.rows):
        (tokens, own), found = train[number]
        size = len(row["prompt"])
        assert found == number and bytes(tokens[4 - size:4].tolist()).decode() == row["prompt"]
        assert tokens.count_nonzero() == size and own.tolist() == [0] * (4 - size) + [1] * (size + 7)
    cut, _ = read(tmp_path, length=14, too_long="cut", count=8)
    assert len(cut) == 5 and any(bytes(inputs[0, :7].tolist()) == b"ongest?" for inputs, _ in cut)
    assert len(read(tmp_path, count=2)[0]) == 2 and cut.prompt == list(cut.rows[0]["prompt"].encode())[-7:]


@pytest.mark.parametrize(("row", "options", "said"), [
    ({"completion": "a"}, {}, r"6: needs a prompt, a text or a list .*; it has completion \(str\)"),
    ({"prompt": "a\udc00"}, {}, r"chat.jsonl:6: has '\\udc00', half of a character"),
    ({"prompt": [{"role": "user", "content": "\0"}]}, {}, "chat.jsonl:6: message 1: has a zero byte"),
    ({"prompt": ""}, {}, "chat.jsonl:6: needs a prompt"), ({"prompt": [{"role": "user"}]}, {}, "chat.jsonl:6: needs a"),
    ({"prompt": [{"role": "tool", "content": "a"}]}, {}, "chat.jsonl:6: the role 'tool' is not system, user or"),
    ({"prompt": "\x7f"}, {"vocabulary": 127}, "chat.jsonl:6: has token 127, and the model's vocabulary ends at 126"),
    (ROWS[0], {"length": 7}, "--length 7: none of 6 prompts leaves room for --max-new 7"),
    (ROWS[0], {"length": 7, "too_long": "cut"}, "--length 7: none of 6 prompts leaves room for --max-new 7")])
def test_what_cannot_be_used_is_named(tmp_path, row, options, said):
    with pytest.raises(UsageError, match=said):
        read(tmp_path, [*ROWS, row], **options)
