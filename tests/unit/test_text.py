"""What the language model's data and configuration mean."""
import json
import zipfile

import numpy as np
import pytest

from common.errors import UsageError
from language import gpt, llama, text


def test_windows_differ_by_seed_and_reach_both_ends_of_the_text(tmp_path):
    (tmp_path / "one.txt").write_text("".join(map(chr, range(1, 120))))
    sets = [text.create_datasets("text", tmp_path / "one.txt", 5, 2000, seed)[0] for seed in (0, 1)]
    starts = [windows.starts.tolist() for windows in sets]
    assert starts[0] != starts[1]
    assert set(starts[0]) == set(range(len(sets[0].tokens) - 5))


def test_one_document_of_twenty_is_for_validation(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02}" * 20)
    train, val = text.create_datasets("text", tmp_path, 4, 8, seed=0)
    assert train.tokens.tobytes().count(0) == 38
    assert val.tokens.tobytes() == b"38" * 20 + b"\0" + b"39" * 20 + b"\0"


def test_neither_a_mark_of_utf_8_nor_an_empty_file_is_text(tmp_path):
    for name, content in {"a.txt": b"\xef\xbb\xbf" + b"words" * 9, "b.txt": b"words" * 9, "c.txt": b""}.items():
        (tmp_path / name).write_bytes(content)
    for part in text.create_datasets("text", tmp_path, 4, 8, seed=0):
        assert part.tokens.tobytes() == b"words" * 9 + b"\0"


def test_a_file_of_a_mac_is_no_document(tmp_path):
    (tmp_path / "a.txt").write_text("words" * 50)
    (tmp_path / "._a.txt").write_bytes(b"\0\5\x16\7")
    train, _ = text.create_datasets("text", tmp_path, 4, 8, seed=0)
    assert len(train.tokens) == 5 * 50 * 95 // 100 + 1


def test_what_is_left_out_of_a_folder_of_texts_is_said(tmp_path, capsys):
    for name in ("a.txt", "b.TXT", "c.md", "d.txt.gz"):
        (tmp_path / name).write_text("words" * 50)
    train, val = text.create_datasets("text", tmp_path, 4, 8, seed=0)
    assert len(train.tokens) == len(val.tokens) == 5 * 50 + 1
    assert capsys.readouterr().out == f"{tmp_path}: not used, as it is no .txt file: c.md, and 1 more\n" \
        f"{tmp_path}: training reads 1 file(s) up to a.txt (250 bytes), validation 1 from b.TXT on (250 bytes)\n"
    (tmp_path / "e.txt").mkdir()
    with pytest.raises(UsageError, match=r"^--data-path: .*e\.txt: Is a directory"):
        text.create_datasets("text", tmp_path, 4, 8, seed=0)


def test_the_files_of_each_part_are_said(tmp_path, capsys):
    for name, size in {"train.txt": 3000, "val.txt": 9, "test.txt": 20}.items():
        (tmp_path / name).write_text("a" * size)
    text.create_datasets("text", tmp_path, 4, 8, seed=0)
    assert capsys.readouterr().out == (
        f"{tmp_path}: training reads 2 file(s) up to train.txt (3,020 bytes), validation 1 from val.txt on (9 bytes)\n")


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(UsageError, match=f"^--data-path: {tmp_path}: the folder has no files that end in .txt"):
        text.create_datasets("text", tmp_path, 4, 8, seed=0)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=f"^--data-path: {tmp_path}: no text; empty files: a.txt, b.txt$"):
        text.create_datasets("text", tmp_path, 4, 8, seed=0)
    with pytest.raises(UsageError, match="^--data-path: .*a.txt: no text; empty files: a.txt$"):
        text.create_datasets("text", tmp_path / "a.txt", 4, 8, seed=0)


@pytest.mark.parametrize(("content", "said"), [
    ("words".encode("utf-16-le"), "a.txt: has a zero byte at position 1, as UTF-16"),
    ("words".encode("utf-16"), "a.txt: .*decode byte 0xff"), (b"words\0", "a.txt: has a zero byte at position 5,")])
def test_what_is_no_utf_8_is_named_with_its_file(tmp_path, content, said):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=said):
        text.create_datasets("text", tmp_path, 4, 8, seed=0)


TOKENS = np.random.RandomState(0).randint(0, 50257, 3000)
HEADER = np.zeros(256, np.int32)
HEADER[:3] = 20240520, 1, 3000


def save_array(file, tokens):
    with open(file, "wb") as opened:
        np.save(opened, tokens)


@pytest.mark.parametrize("write", [
    lambda file: TOKENS.astype(np.uint16).tofile(file), lambda file: save_array(file, TOKENS.astype(np.uint16)),
    lambda file: file.write_bytes(HEADER.tobytes() + TOKENS.astype(np.uint16).tobytes()),
    lambda file: file.write_bytes(np.int32([20240801, 7, 3000, *[0] * 253]).tobytes()
                                  + TOKENS.astype(np.uint32).tobytes())],
    ids=["plain", "npy", "llm.c", "llm.c's Llama 3"])
def test_tokens_are_read_in_each_format(tmp_path, write):
    for part in ("train", "val"):
        write(tmp_path / f"{part}.bin")
    for windows in text.create_datasets("tokens", tmp_path, 4, 8, seed=0):
        assert np.array_equal(windows.tokens, TOKENS)


def save_zip(file):
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("tokens", TOKENS.tobytes())


@pytest.mark.parametrize(("write", "said"), [
    *((lambda file, kind=kind: TOKENS.astype(kind).tofile(file), "numbers of 4 or 8 bytes, not uint16")
      for kind in ("<u4", "<i8", ">u4", ">i8")),
    (lambda file: (TOKENS + 2**18).astype(np.uint32).tofile(file), "numbers of 4 or 8 bytes"),  # a large vocabulary
    (lambda file: file.write_text("It was a dark and stormy night.\n" * 9), "text, or tokens of one byte, not"),
    (lambda file: (TOKENS % 65).astype(np.uint8).tofile(file), "text, or tokens of one byte, not uint16 tokens"),
    *((lambda file, kind=kind, last=last: np.append(TOKENS, np.full(3000, last)).astype(kind).tofile(file),
       "its last 4,096 bytes repeat; it was not written to its end") for kind, last in (("<u2", 0), ("<u2", 50256))),
    (save_zip, "a zip, gzip"), (lambda file: save_array(file, TOKENS), r"has int64 values of shape \(3000,\)"),
    (lambda file: file.write_bytes(HEADER.tobytes() + TOKENS[:2999].astype(np.uint16).tobytes()),
     "incomplete: 2,999 tokens, and its header says 3,000"), (lambda file: file.write_bytes(b""), "empty")])
def test_what_is_no_file_of_tokens_is_refused(tmp_path, write, said):
    for part in ("train", "val"):
        write(tmp_path / f"{part}.bin")
    with pytest.raises(UsageError, match=f"^--data-path: .*train.bin: .*{said}"):
        text.create_datasets("tokens", tmp_path, 4, 8, seed=0)


def test_the_token_that_ends_a_document():
    assert text.end(256, None) == 0 and text.end(50257, None) == 50256 and text.end(61, 7) == 7
    with pytest.raises(UsageError, match="has no eos_token_id"):
        text.end(61, None)


CONFIG = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-5, "eos_token_id": 7,
          "rope_theta": 5000.0, "tie_word_embeddings": True}
SIZE = gpt.Size(32, 2, 4, 2, 48, base=5000.0, vocabulary=61, end=7)


def read(folder, change):
    """Return the size of a config.json with CONFIG and a change; a value of None leaves a field out."""
    content = {name: value for name, value in (CONFIG | change).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return llama.size(str(folder))


@pytest.mark.parametrize(("change", "expected"), [
    ({}, SIZE), ({"head_dim": 8}, SIZE), ({"tie_word_embeddings": None}, SIZE._replace(tied=False)),
    ({"num_key_value_heads": None}, SIZE._replace(groups=4)), ({"rope_theta": None}, SIZE._replace(base=10000.0)),
    ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, SIZE._replace(base=7.0)),
    ({"eos_token_id": [7, 8]}, SIZE._replace(end=None))])
def test_a_published_size_is_read(tmp_path, change, expected):
    assert read(tmp_path, change) == expected


@pytest.mark.parametrize(("change", "message"), [
    ({"rms_norm_eps": None}, "rms_norm_eps 1e-06, not the model's 1e-05"), ({"head_dim": 16}, "head_dim 16, not"),
    ({"hidden_act": "gelu"}, "hidden_act gelu"), ({"attention_bias": True}, "attention_bias True"),
    ({"mlp_bias": True}, "mlp_bias True"), ({"model_type": "mistral"}, "model_type mistral"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling {.*llama3"),
    ({"hidden_size": None}, "hidden_size"), ({"vocab_size": None}, "has no 'vocab_size'")])
def test_a_model_that_computes_something_else_is_named(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, change)
