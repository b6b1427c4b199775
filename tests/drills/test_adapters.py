"""Adapters that two processes trained: peft adds them to transformers' Llama, and they compute the same there."""
import sys

import pytest
import torch
from conftest import PYTHON, TORCHRUN, good, run

from language import gpt, llama, lora


@pytest.mark.nightly
def test_peft_loads_the_adapters_and_computes_the_same(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers", reason="no transformers: pip install -r requirements/drill.txt")
    peft = pytest.importorskip("peft", reason="no peft: pip install -r requirements/drill.txt")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, rms_norm_eps=1e-5, tie_word_embeddings=False)).save_pretrained(tmp_path / "base")
    options = ["--model", tmp_path / "base", "--weights", tmp_path / "base"]
    good(run(*TORCHRUN, "--nproc-per-node=2", "-m", "language.train_LoRA", *options, "--output-dir", tmp_path, "--lr",
             "0.02", "--windows", "64", "--length", "128", "--batch-size", "8", "--warmup-steps", "0", "--epochs", "2",
             "--sample", ""))
    good(run(PYTHON, "-m", "language.lora", tmp_path / "best.pt", tmp_path / "adapters"))
    for module, *words in ((lora, "best.pt", "merged.pt", "--weights", "base"),
                           (llama, "merged.pt", "merged", "--model", "base")):
        names = [word if word.startswith("--") else str(tmp_path / word) for word in words]
        monkeypatch.setattr(sys, "argv", [module.__name__, *names])
        module.main()

    tokens = torch.randint(256, (2, 40))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = base(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert {type(each).__name__ for each in base.modules() if hasattr(each, "lora_A")} == {"Linear"}
    found = adapted(tokens).logits
    assert (found - plain).abs().max() > 0.1
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(tokens).logits, found, rtol=1e-4, atol=1e-4)
    model = gpt.GPT(llama.size(str(tmp_path / "base")), 256)
    llama.load_weights(model, str(tmp_path / "merged.pt"))
    torch.testing.assert_close(model(tokens), found, rtol=1e-4, atol=1e-4)

    saved = llama.read(str(tmp_path / "adapters/adapter_model.safetensors"))
    adapted.save_pretrained(tmp_path / "again")
    again = llama.read(str(tmp_path / "again/adapter_model.safetensors"))
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
