"""The language model computes what transformers' Llama and GLM-4 MoE compute, from the same weights and names."""
import pytest
import torch

from common.language import gpt


@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_are_those_of_transformers(tied):
    transformers = pytest.importorskip("transformers", reason="no transformers: pip install -r requirements-drill.txt")
    size = gpt.Size(32, 2, 4, 2, 48, tied=tied, base=5000.0)
    model = gpt.GPT(size, 61).double()
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, rms_norm_eps=1e-5, tie_word_embeddings=tied, rope_theta=5000.0,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    other = transformers.LlamaForCausalLM(config).double().eval()
    assert not other.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    tokens = torch.randint(61, (2, 20))
    torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=1e-5, atol=1e-6)


def test_the_logits_of_experts_are_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="no transformers: pip install -r requirements-drill.txt")
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
