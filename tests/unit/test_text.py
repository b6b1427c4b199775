"""What the language model's data and configuration mean."""
import json

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
