"""Which tokens of a pair count, how pairs are packed, and what cannot be used."""
import json
import math

import pytest
import torch
import torch.nn.functional as F

from common.errors import UsageError
from language import gpt, pairs


def write(folder, *rows):
    """Write a file of rows, each a JSON value or a line, and a last row for validation; return its path."""
    last = {"prompt": "v", "completion": "w"}
    lines = [row if isinstance(row, str) else json.dumps(row) for row in (*rows, last)]
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "chat.jsonl")


def read(path, length=32, too_long="drop", vocabulary=None, count=None):
    return pairs.create_datasets("chat", path, None, length, count, too_long, vocabulary)


def unpacked(dataset):
    """Return the text and the counted text of each pair in the windows of a dataset, sorted."""
    found = []
    for inputs, targets in dataset:
        tokens, numbers = inputs
        for number in range(1, int(numbers.max()) + 1):
            here = numbers == number
            own, counts = targets[here], targets[here] != pairs.IGNORED
            assert torch.equal(own[:-1][counts[:-1]], tokens[here][1:][counts[:-1]])  # the next tokens
            found.append((bytes(tokens[here].tolist()).decode(), bytes(own[counts].tolist()).decode()))
        assert (targets[numbers == 0] == pairs.IGNORED).all() and (tokens[numbers == 0] == 0).all()
    return sorted(found)


CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "one"},
        {"role": "user", "content": "w"}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(("row", "text", "counted"), [
    ({"prompt": "2+2=", "completion": "four"}, "2+2=four", "four\0"),
    ({"prompt": "", "completion": "all"}, "all", "ll\0"),  # no token precedes the first one
    ({"prompt": "\N{GRINNING FACE}", "completion": r"\ud83d"}, "\N{GRINNING FACE}\\ud83d", "\\ud83d\0"),  # no halves
    ({"prompt": "ends", "completion": "with\0"}, "endswith", "with\0"),
    ({"messages": CHAT}, "system\ns\0user\nu\0assistant\none\0user\nw\0assistant\ntwo", "one\0two\0"),
    ({"prompt": CHAT[:4], "completion": CHAT[4:]}, "system\ns\0user\nu\0assistant\none\0user\nw\0assistant\ntwo",
     "two\0"),
    ({"prompt": CHAT[:4], "completion": CHAT}, "system\ns\0user\nu\0assistant\none\0user\nw\0assistant\ntwo", "two\0")])
def test_the_answers_and_the_tokens_that_end_them_count(tmp_path, row, text, counted):
    train, val = read(write(tmp_path, row), length=64)
    assert unpacked(train) == [(text, counted)] and unpacked(val) == [("vw", "w\0")]
    assert bytes(train.prompt).decode() in text and train.describe().startswith(
        f"1 pairs (0 longer ones dropped) in 1 windows, {len(counted)} tokens of answers")


def test_each_pair_is_in_one_window_and_windows_are_full(tmp_path):
    torch.manual_seed(0)
    rows = [{"prompt": chr(65 + number % 26) * int(size), "completion": str(number)}
            for number, size in enumerate(torch.randint(1, 25, (200,)))]
    train, _ = read(write(tmp_path, *rows))
    expected = [(row["prompt"] + row["completion"], row["completion"] + "\0") for row in rows[:191]]
    assert unpacked(train) == sorted(expected)
    assert (train.inputs[:, 1] > 0).mean() > 0.95
    fewer, val = read(write(tmp_path, *rows), count=12)
    assert (len(fewer), len(val)) == (12, 2) and set(unpacked(fewer)) < set(unpacked(train))


def test_packed_pairs_have_the_losses_that_they_have_alone(tmp_path):
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in [
        ("ab", "cdef"), ("b", "aa"), ("xyz", "q")]]
    train, _ = read(write(tmp_path, *rows))
    assert len(train) == 1
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Size(16, 2, 4, 2, 24), 256).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs, targets = train.__getitems__([0])
    expected = torch.zeros((), dtype=torch.float64)
    for row in rows:
        tokens = torch.tensor([[*row["prompt"].encode(), *row["completion"].encode(), 0]])
        start = len(row["prompt"])
        expected += F.cross_entropy(model(tokens)[0, start - 1:-1], tokens[0, start:], reduction="sum")
    torch.testing.assert_close(pairs.sum_loss(model(inputs), targets), expected, rtol=1e-12, atol=0)
    assert pairs.count(targets) == 4 + 2 + 1 + 3
    torch.testing.assert_close(pairs.bits(model(inputs), targets), expected[None] / math.log(2), rtol=1e-12, atol=0)
    assert abs(pairs.sum_loss(model(inputs[:, 0]), targets) - expected) > 1e-3  # without the pairs' numbers


def test_hits_are_counted():
    targets = torch.tensor([[1, 2, pairs.IGNORED, 3], [4, pairs.IGNORED, pairs.IGNORED, 0]])
    logits = F.one_hot(torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), 8).float()
    assert pairs.hits(logits, targets).tolist() == [2, 1]


@pytest.mark.parametrize(("row", "said"), [
    ("{'prompt': 1}", "chat.jsonl:2: Expecting property name"), ("[1, 2]", "chat.jsonl:2: is not a JSON object"),
    ({"text": "a"}, r"chat.jsonl:2: needs messages, .* or prompt and completion; it has text \(str\)"),
    ({"prompt": "a", "completion": 4}, r"chat.jsonl:2: needs .* it has prompt \(str\), completion \(int\)$"),
    ({"messages": [*CHAT, {"role": "user", "content": None}]}, r"chat.jsonl:2: needs .* it has messages \(list\)$"),
    ({"prompt": "a", "completion": "b\ud83d"}, r"chat.jsonl:2: has '\\ud83d', half of a character"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, r"chat.jsonl:2: has '\\udc00', half of a character"),
    ({"messages": [CHAT[1], {"role": "assistant", "content": "a\0b"}]}, "chat.jsonl:2: message 2: has a zero byte"),
    ({}, "chat.jsonl:2: needs .* it has nothing"), ({"prompt": "a"}, "chat.jsonl:2: needs .* it has prompt"),
    ({"prompt": "a", "completion": ""}, "chat.jsonl:2: the completion is empty"),
    ({"prompt": "a", "completion": [CHAT[2]]}, "chat.jsonl:2: needs messages"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "chat.jsonl:2: needs messages, a list of"),
    ({"messages": CHAT[:2]}, "chat.jsonl:2: no message of the assistant"),
    ({"messages": [*CHAT[:2], {"role": "assistant", "content": ""}]}, "chat.jsonl:2: message 3: the answer is empty"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "chat.jsonl:2: the role 'tool' is not system, user or")])
def test_what_cannot_be_used_is_named_with_its_line(tmp_path, row, said):
    with pytest.raises(UsageError, match=said):
        read(write(tmp_path, {"prompt": "a", "completion": "b"}, row))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match="^--data-path: .*none.jsonl: No such file"):
        read(str(tmp_path / "none.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(UsageError, match="^--data-path: .*latin.jsonl: .*decode byte 0xe9"):
        read(str(tmp_path / "latin.jsonl"))
    (tmp_path / "one.jsonl").write_text('\ufeff{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(UsageError, match="^--data-path: .*one.jsonl: has one row, and needs at least two: one to"):
        read(str(tmp_path / "one.jsonl"))
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="^--data-path: .*none.jsonl: has no row, and needs at least two"):
        read(str(tmp_path / "none.jsonl"))


def test_a_pair_that_is_too_long_is_dropped_or_cut(tmp_path):
    path = write(tmp_path, {"prompt": "a" * 30, "completion": "answer"}, {"prompt": "b", "completion": "c"})
    train, _ = read(path)
    assert unpacked(train) == [("bc", "c\0")] and train.describe().startswith("1 pairs (1 longer ones dropped)")
    train, _ = read(path, too_long="cut")
    assert unpacked(train) == [("a" * 30 + "an", "ans"), ("bc", "c\0")]
    fits, _ = read(path, length=36)  # 30 + 6 tokens and the end, of which the last is only a target
    assert len(unpacked(fits)) == 2
    with pytest.raises(UsageError, match="chat.jsonl:1: no token of the answer is left in the first 30; raise"):
        read(path, length=29, too_long="cut")
    with pytest.raises(UsageError, match="--length 1: there are 2 pairs for training, and none fits"):
        read(path, length=1)


def test_a_long_chat_is_read_only_as_far_as_a_window_reaches(monkeypatch):
    coder, seen = pairs.Bytes(), []
    monkeypatch.setattr(coder, "render", lambda messages, ask: (seen.append(len(messages)),
                                                                pairs.Bytes.render(coder, messages, ask))[1])
    row = {"messages": CHAT[1:3] * 500}
    tokens, counted, prompt = pairs.encode("here", row, coder, 60)  # 21 bytes for a question and its answer
    assert len(seen) == 1 + 2 * 4 and len(tokens) == 21 * 500 == len(counted) and prompt == 17
    everything = pairs.encode("here", row, coder)
    assert (tokens, counted[:60]) == (everything[0], everything[1][:60]) and sum(everything[1]) == 4 * 500


def test_a_token_beyond_the_vocabulary_is_named_with_its_line(tmp_path):
    path = write(tmp_path, {"prompt": "\x01", "completion": "\x05"}, {"prompt": "\x01", "completion": "\x06"})
    with pytest.raises(UsageError, match="chat.jsonl:2: has token 6, and the model's vocabulary ends at 5"):
        read(path, vocabulary=6)


SOURCE = b'''class Some:
    def name(self, one=(1, 2)) -> str:
        """What it
        does."""
        if one:

            return "a"
        return ""

    def empty(self):
        """Only this."""

def other(): return 1

def last(a):
    """Last."""
    return a
'''


def test_a_pair_of_the_standard_library_is_a_function_with_a_docstring(monkeypatch):
    files = [SOURCE] * 39 + [b'def v():\n    """V."""\n    pass\n']
    monkeypatch.setattr("language.text.standard_library", lambda: files)
    train, val = pairs.create_datasets("stdlib", "", None, 200, None, "drop")
    one = 'def name(self, one=(1, 2)) -> str:\n    """What it\n    does."""\n'
    body = '    if one:\n\n        return "a"\n    return ""\n'
    other = 'def last(a):\n    """Last."""\n'
    assert {*unpacked(train)} == {(one + body, body + "\0"), (other + "    return a\n", "    return a\n\0")}
    assert len(unpacked(train)) == 2 * 38 and len(unpacked(val)) == 2 + 1  # one file of twenty is for validation


def test_an_answer_ends_at_its_end_token(tmp_path, monkeypatch):
    train, val = read(write(tmp_path, {"prompt": "a", "completion": "b"}))
    said = iter([[*b"v", *b"yes\x07", 0, *b"no"], [*b"why", *b"so"]])
    asked = []
    monkeypatch.setattr(gpt, "draw", lambda model, tokens, *_: (asked.append(bytes(tokens)), next(said))[1])
    assert pairs.answer(None, val, None, 0) == "vyes\N{REPLACEMENT CHARACTER}"
    assert pairs.answer(None, val, "why", 0) == "whyso" and asked == [b"v", b"why"]
    assert pairs.answer(None, val, "", 0) == ""
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "u", "messages": CHAT[1:3]}) + "\n" + json.dumps(
        {"prompt": "u", "messages": CHAT[1:3]}))
    said = iter([[*b"user\nwhy\0assistant\n", *b"so"]])
    assert pairs.answer(None, read(str(tmp_path / "chat.jsonl"))[1], "why", 0).endswith("assistant\nso")
    assert asked[-1] == b"user\nwhy\0assistant\n"  # as in training, although prompt is a text
    (tmp_path / "chat.jsonl").write_text('{"prompt": "", "completion": "b"}\n' * 2)
    assert pairs.answer(None, read(str(tmp_path / "chat.jsonl"))[1], None, 0) == ""  # no token to begin with
