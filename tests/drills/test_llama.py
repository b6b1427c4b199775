"""The language model computes what transformers' Llama computes, from the same weights, in files of either."""
import json

import pytest
import torch
from conftest import PYTHON, good, run

from common import checkpoint
from common.errors import UsageError
from language import gpt, llama

SIZE = gpt.Size(32, 2, 4, 2, 48, base=5000.0, vocabulary=61, end=7)


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="no transformers: pip install -r requirements/drill.txt")


def require_equal(model, other):
    tokens = torch.randint(61, (2, 20))
    torch.testing.assert_close(model(tokens), other(tokens).logits[..., :61], rtol=0, atol=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_published_weights_compute_the_same_here(transformers, tied, tmp_path, capsys):
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        eos_token_id=7, intermediate_size=48, rms_norm_eps=1e-5, tie_word_embeddings=tied, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    other = transformers.LlamaForCausalLM(config).eval()
    for name, most in {"whole": "1GB", "shards": "20KB"}.items():
        other.save_pretrained(tmp_path / name, max_shard_size=most)
        size = llama.size(str(tmp_path / name))
        assert size == SIZE._replace(tied=tied)
        model = gpt.GPT(size, 50257)
        llama.load_weights(model, str(tmp_path / name))
        require_equal(model, other)
        assert capsys.readouterr().out.endswith(f"of {20 + (not tied)} tensors\n")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 1


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_transformers_loads_an_exported_checkpoint(transformers, tied, tmp_path):
    torch.manual_seed(0)
    size = SIZE._replace(tied=tied)
    model = gpt.GPT(size, 61)
    for parameter in model.parameters():
        parameter.data *= 9  # so that each number of the configuration changes the logits
    (tmp_path / "config.json").write_text(json.dumps(llama.config(size, 61) | {"eos_token_id": 7}))
    checkpoint.save_checkpoint(tmp_path / "last.pt", {"model": model.state_dict()})
    good(run(PYTHON, "-m", "language.llama", tmp_path / "last.pt", tmp_path / "out", "--model", tmp_path))
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    require_equal(model, other)
    assert other.config.eos_token_id == 7 and other.dtype == torch.float32
    again = gpt.GPT(llama.size(str(tmp_path / "out")), 61)
    llama.load_weights(again, str(tmp_path / "out/model.safetensors"))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("field", "value", "message"), [
    ("rms_norm_eps", 1e-6, "its config.json has rms_norm_eps 1e-06, not the model's 1e-05"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "its config.json has rope_scaling {.*llama3.*}, not "),
    ("model_type", "qwen3", "its config.json has model_type qwen3, not "), ("head_dim", 16, "has head_dim 16, not "),
    ("vocab_size", None, "has no 'vocab_size'"), ("num_attention_heads", "4", "unsupported operand")])
def test_a_llama_that_the_model_cannot_compute_is_named(tmp_path, field, value, message):
    found = llama.config(SIZE, 61) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps({key: one for key, one in found.items() if one is not None}))
    with pytest.raises(UsageError, match=message):
        llama.size(str(tmp_path))


def test_the_logits_of_experts_are_those_of_transformers(transformers):
    model = gpt.GPT(gpt.Size(32, 2, 4, 2, 48, tied=False, experts=6, active=3), 61).double()
    for block in model.model.layers:
        torch.nn.init.normal_(block.mlp.gate.e_score_correction_bias, std=0.1)
    config = transformers.Glm4MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        moe_intermediate_size=48, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=0,
        first_k_dense_replace=0, routed_scaling_factor=1.0, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        experts_implementation="eager")  # the others do not compute in float64
    other = transformers.Glm4MoeForCausalLM(config).double().eval()
    assert not other.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    tokens = torch.randint(61, (2, 20))
    torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=1e-5, atol=1e-6)
