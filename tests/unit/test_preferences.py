"""What a pair of answers becomes, its margin, and what cannot be used."""
import json

import pytest
import torch

from common.errors import UsageError
from language import gpt, pairs, preferences

LAST = {"prompt": "v", "chosen": "w", "rejected": "x"}  # for validation


def read(folder, *rows, length=32, too_long="drop", vocabulary=None, count=None):
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, (*rows, LAST))))
    return preferences.create_datasets("chat", str(folder / "chat.jsonl"), None, length, count, too_long, vocabulary)


def texts(dataset):
    """Return for each pair the text and the counted text of both answers, sorted."""
    found = []
    for inputs, targets in zip(dataset.inputs, dataset.targets, strict=True):
        both = []
        for tokens, own in zip(inputs, targets, strict=True):
            counts = own != pairs.IGNORED
            assert (own[:-1][counts[:-1]] == tokens[1:][counts[:-1]])[:-1].all()  # the next tokens
            both.append((bytes(tokens.tolist()).rstrip(b"\0").decode(), bytes(own[counts].tolist()).decode()))
        found.append(both)
    return sorted(found)


ASK, SYSTEM = [{"role": "user", "content": "u"}], [{"role": "system", "content": "s"}]
ONE, TWO = ([{"role": "assistant", "content": words}] for words in ("one", "two!"))
SAID = [("user\nu\0assistant\none", "one\0"), ("user\nu\0assistant\ntwo!", "two!\0")]


@pytest.mark.parametrize(("row", "wanted"), [
    ({"prompt": "2+2=", "chosen": "four", "rejected": "5"}, [("2+2=four", "four\0"), ("2+2=5", "5\0")]),
    ({"prompt": ASK, "chosen": ONE, "rejected": TWO}, SAID),
    ({"chosen": ASK + ONE, "rejected": ASK + TWO}, SAID),
    ({"prompt": ASK, "chosen": ASK + ONE, "rejected": ASK + TWO}, SAID),
    ({"prompt": "u", "chosen": ASK + ONE, "rejected": ASK + TWO}, SAID)])
def test_each_answer_follows_the_prompt_and_alone_counts(tmp_path, row, wanted):
    train, val = read(tmp_path, row)
    assert texts(train) == [wanted] and texts(val) == [[("vw", "w\0"), ("vx", "x\0")]]
    counted = sum(len(answer) for _, answer in wanted)
    assert train.describe().startswith(f"1 pairs (0 longer ones dropped), {counted} tokens of answers (sha256 ")
    assert bytes(train.prompt).decode() == wanted[0][0].removesuffix(wanted[0][1].rstrip("\0"))


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "a", "chosen": "b"},
     r"chat.jsonl:2: needs prompt, chosen and rejected, .*; it has prompt \(str\), chosen \(str\)$"),
    ({"prompt": "a", "chosen": 4, "rejected": ASK + ["b"]},
     r"chat.jsonl:2: needs .*, chosen \(int\), rejected \(list\)$"),
    ({}, "chat.jsonl:2: needs .* it has nothing"), ({"chosen": "ab", "rejected": "ac"}, "chat.jsonl:2: needs prompt"),
    *((row, "chat.jsonl:2: chosen and rejected must begin with the same prompt; if prompt is a text, it must be one")
      for row in ({"prompt": "u", "chosen": ONE, "rejected": TWO}, {"chosen": ONE, "rejected": TWO},
                  {"prompt": "a", "chosen": ASK + ONE, "rejected": ASK + TWO},
                  {"chosen": ASK + ONE, "rejected": [{"role": "user", "content": "u "}] + ONE},
                  {"chosen": ASK + SYSTEM + ONE, "rejected": ASK + ONE},
                  {"chosen": SYSTEM + ASK + ONE, "rejected": SYSTEM + [{"role": "user", "content": "u "}] + ONE})),
    ({"prompt": "a", "chosen": "b", "rejected": ""}, "chat.jsonl:2: rejected: the completion is empty"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chat.jsonl:2: chosen and rejected are equal"),
    ({"chosen": ASK + ONE, "rejected": ASK + ONE}, "chat.jsonl:2: chosen and rejected are equal"),
    ({"chosen": ASK + ONE, "rejected": ASK}, "chat.jsonl:2: rejected: no message of the assistant"),
    ({"prompt": ASK, "chosen": [{"role": "bot", "content": "b"}], "rejected": TWO}, "chosen: the role 'bot' is not"),
    ({"prompt": "a" * 40, "chosen": "b", "rejected": "c"}, "2: chosen: no token of the answer is left in the first 33"),
    ({"prompt": "a" * 30, "chosen": "bbbb", "rejected": "bbbc"}, "2: chosen and rejected have the same tokens")])
def test_what_cannot_be_used_is_named_with_its_line(tmp_path, row, said):
    with pytest.raises(UsageError, match=said):
        read(tmp_path, LAST, row, too_long="cut")


def test_a_pair_is_dropped_if_one_answer_is_too_long(tmp_path):
    rows = LAST, {"prompt": "a", "chosen": "b", "rejected": "c" * 40}, LAST
    train, _ = read(tmp_path, *rows)
    assert len(train) == 2 and train.describe().startswith("2 pairs (1 longer ones dropped)")
    train, _ = read(tmp_path, *rows, too_long="cut")
    assert texts(train)[0] == [("ab", "b\0"), ("a" + "c" * 31, "c" * 32)]
    assert list(map(len, read(tmp_path, *[LAST] * 60, count=9))) == [9, 2]
    with pytest.raises(UsageError, match="--length 1: there are 3 pairs for training, and none fits"):
        read(tmp_path, *rows, length=1)
    with pytest.raises(UsageError, match="chat.jsonl:1: rejected: has token 120, and the model's vocabulary ends at"):
        read(tmp_path, *rows, vocabulary=120)


def test_the_rejected_body_is_another_one_at_least_twice_as_long(monkeypatch):
    def source(*names):
        return "".join(f'def {name}():\n    """It."""\n    return {name}\n' for name in names).encode()

    same = b'def x():\n    """It."""\n    return one\n'
    monkeypatch.setattr("language.text.standard_library", lambda: [source("one", "x" * 20, "y" * 60), same,
                                                                   source("v", "w" * 20)])
    train, val = preferences.create_datasets("stdlib", "", None, 150, None, "drop")
    found = [[answer.removeprefix("    return ").rstrip("\n\0") for _, answer in both]
             for both in texts(train) + texts(val)]
    assert sorted(found) == [["one", "x" * 20], ["one", "x" * 20], ["v", "w" * 20], ["x" * 20, "y" * 60]]


@pytest.fixture
def case(tmp_path):
    """Return pairs, a reference and another model; torch computes in float64 meanwhile."""
    torch.set_default_dtype(torch.float64)
    train, _ = read(tmp_path, *({"prompt": "ask"[:size % 3 + 1], "chosen": "b" * size, "rejected": "c" * (11 - size)}
                                for size in range(1, 11)))
    torch.manual_seed(0)
    models = []
    for _ in range(2):
        models.append(gpt.GPT(gpt.Size(16, 2, 4, 2, 24), 256))
        for parameter in models[-1].parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    yield train, *models
    torch.set_default_dtype(torch.float32)


def log_probability(model, words, answer):
    """Return the log-probability of the answer at the end of a text, alone and without padding."""
    tokens = torch.tensor(list(words.encode()))
    scores = model(tokens[None, :-1])[0].log_softmax(1)
    return sum(scores[place - 1, tokens[place]] for place in range(len(tokens) - len(answer), len(tokens)))


def test_the_loss_is_that_of_the_paper(case):
    """It is computed here one answer at a time, unpadded, from the formula (arXiv:2305.18290, equation 7)."""
    train, reference, model = case
    train.measure(preferences.Margins(reference, 0.3), 4, torch.device("cpu"))
    train.measure(preferences.Margins(model, 0.3), 4, torch.device("cpu"))  # changes nothing: it is known
    inputs, targets, known = train.__getitems__(range(10))
    margins = preferences.Margins(model, 0.3)(inputs, targets, known)
    wanted = []
    for row in range(10):
        total = 0
        for place, sign in ((0, 1), (1, -1)):
            answer = bytes(targets[row, place][targets[row, place] >= 0].tolist()).decode()
            tokens = bytes(inputs[row, place].tolist()).rstrip(b"\0").decode() + "\0"
            total += sign * (log_probability(model, tokens, answer) - log_probability(reference, tokens, answer))
        wanted.append(0.3 * total)
    torch.testing.assert_close(margins, torch.stack(wanted), rtol=1e-11, atol=0)
    loss = sum(-torch.log(1 / (1 + torch.exp(-each))) for each in wanted)
    torch.testing.assert_close(preferences.sum_loss(margins), loss, rtol=1e-11, atol=0)
    assert preferences.wins(margins, margins).tolist() == [each > 0 for each in wanted]
    assert 0 < preferences.wins(margins, margins).sum() < 10


def test_the_ranks_measure_each_pair_once(case, monkeypatch):
    """Three ranks have four of ten pairs each: two of them are padding, and add nothing to the sum over the ranks."""
    train, reference, _ = case
    margins, tables = preferences.Margins(reference, 0.3), []
    monkeypatch.setattr(preferences.reduce, "get_world_size", lambda: 3)
    monkeypatch.setattr(preferences.reduce, "reduce_sum", lambda table: tables.append(table) or table)
    for rank in range(3):
        monkeypatch.setattr(preferences.reduce, "get_rank", lambda rank=rank: rank)
        train.reference = torch.empty(0, 2)
        train.measure(margins, 3, torch.device("cpu"))
    inputs, targets, _ = train.__getitems__(range(10))
    torch.testing.assert_close(sum(tables), margins.answers(inputs, targets).to(tables[0]))
