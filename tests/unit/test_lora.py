"""Adapters: what they add, what is trained and saved, what a file of them becomes, and the memory that they take."""
import re
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, load
from test_scripts import script  # noqa: F401  # pytest finds a fixture by its name in this file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UsageError
from language import gpt, lora, pairs

SIZE = gpt.Size(16, 2, 4, 2, 24)
SMALL = ["--dataset", "chat", "--length", "32", "--batch-size", "8", "--warmup-steps", "0", "--lr", "0.01"]


def adapted(seed=0, **more):
    """Return a small model and its adapters."""
    torch.manual_seed(1)
    model = gpt.GPT(SIZE, 64).requires_grad_(False)
    return model, lora.Adapters(model, **{"rank": 3, "alpha": 6, "targets": lora.TARGETS, "seed": seed} | more)


def randomize(adapters):
    for name, parameter in adapters.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3 if "lora_B" in name else 0.1)


def test_a_model_starts_as_it_was_and_trains_the_adapters_alone():
    tokens = torch.randint(64, (2, 9))
    torch.manual_seed(1)
    expected = gpt.GPT(SIZE, 64)(tokens)
    model, adapters = adapted()
    assert torch.equal(model(tokens), expected)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {*adapters.state_dict()} - {"_extra_state"} and len(trainable) == 2 * 7 * 2
    model(tokens).sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trainable


def test_matrices_depend_on_the_seed_and_targets_can_be_chosen():
    one, again, other = (adapted(seed)[1].state_dict() for seed in (0, 0, 1))
    name = "model.layers.1.self_attn.k_proj.lora_A.weight"
    assert torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name])
    assert one[name].shape == (3, 16) and one[name].abs().max() <= 1 / 4 and not one[name].allclose(one[name][:1])
    few = adapted(targets=["v_proj", "up_proj"])[1].state_dict()
    assert {name.split(".")[4] for name in few if name != "_extra_state"} == {"v_proj", "up_proj"}


def test_the_operations_are_those_that_torch_counts():
    """Except in the first layers, whose inputs need no gradient."""
    (model, _), tokens = adapted(), torch.randint(64, (3, 24))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt.loss(model(tokens), tokens).backward()
    attention = model.model.layers[0].self_attn
    first = [attention.q_proj, attention.k_proj, attention.v_proj]
    saved = 2 * sum(layer.weight.numel() + layer.lora_A.weight.numel() for layer in first)
    assert counter.get_total_flops() == (gpt.operations(model, 24) - saved) * tokens.numel()


@pytest.fixture
def merge(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command with adapters, the weights of a model, and more arguments."""
    def start(adapters, weights, *more):
        torch.save({"model": adapters}, tmp_path / "best.pt")
        torch.save({"model": weights}, tmp_path / "base.pt")
        monkeypatch.setattr(sys, "argv", ["lora", *map(str, (tmp_path / "best.pt", tmp_path / "out.pt", *more))])
        lora.main()
        assert capsys.readouterr().out == f"{tmp_path}/out.pt: 14 adapters of rank 3\n"
        return load(tmp_path / "out.pt")["model"]

    return start


def test_merged_weights_compute_the_same(merge, tmp_path):
    (model, adapters), tokens = adapted(), torch.randint(64, (2, 9))
    randomize(adapters)
    plain = gpt.GPT(SIZE, 64)
    base = {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}
    merged = merge(adapters.state_dict(), base, "--weights", tmp_path / "base.pt")
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    plain.load_state_dict(base)
    assert (plain(tokens) - model(tokens)).abs().max() > 0.01
    base["model.layers.0.mlp.up_proj.weight"] += 0.1
    with pytest.raises(UsageError, match="--weights .*base.pt: not the weights with which the adapters were trained"):
        merge(adapters.state_dict(), base, "--weights", tmp_path / "base.pt")
    with pytest.raises(UsageError, match="best.pt: contains no adapters"):
        merge(base, base, "--weights", tmp_path / "base.pt")


def test_the_base_stays_as_it_is(script, tmp_path, monkeypatch, capsys):  # noqa: F811
    """And a run continues only with the same base, which may be in 16 bits, and the same scale."""
    (tmp_path / "chat.jsonl").write_text("\n".join(f'{{"prompt": "{"a" * (number % 7)}", "completion": "{number}"}}'
                                                   for number in range(60)))
    torch.manual_seed(1)
    base = gpt.GPT(gpt.SIZES["gpt_tiny"], 256).state_dict()
    torch.save(base, tmp_path / "base.pt")
    module, args = script("language.train_LoRA", *SMALL, "--data-path", tmp_path / "chat.jsonl", "--weights",
                          tmp_path / "base.pt")
    seen = []
    monkeypatch.setattr(pairs, "answer", lambda model, *_: seen.append(
        {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}) or "")
    for args.bf16 in (True, False):
        args.resume, args.alpha = None, 32
        module.main(args)
        found = seen.pop()
        assert all(torch.equal(found[name], base[name].bfloat16() if args.bf16 else base[name]) for name in base)
        saved = load(tmp_path / "last.pt")["model"]
        assert {*saved} - {"_extra_state"} == {*found} - {*base} and all(
            torch.equal(found[name], saved[name]) and saved[name].dtype == torch.float32 and saved[name].any()
            for name in saved if name != "_extra_state")
        args.resume, args.alpha = tmp_path / "last.pt", 16
        with pytest.raises(UsageError, match="--resume: its adapters have --rank .* --alpha 32 --targets down_proj"):
            module.main(args)
    args.alpha, args.weights = 32, None
    with pytest.raises(UsageError, match="--resume: pass the --weights with which"):
        module.main(args)
    assert " loss " in capsys.readouterr().out


@pytest.mark.parametrize(("half", "processes"), [(True, 1), (True, 4), (False, 4)])
def test_the_memory_is_that_of_the_formula(alone, half, processes):
    """Counted after a step; the widths are multiples of the number of processes, so that no shard is padded."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    mesh = init_device_mesh("cpu", (processes,))
    model = gpt.GPT(SIZE._replace(groups=4, tied=False), 64).requires_grad_(False)
    frozen = sum(parameter.numel() for parameter in model.parameters())
    if half:
        model.bfloat16()
    adapters = lora.Adapters(model, 4, 8, lora.TARGETS, 0)
    trained = sum(parameter.numel() for parameter in adapters.parameters())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(adapters.parameters())
    model(torch.randint(64, (2, 9))).sum().backward()
    optimizer.step()
    adapters.state_dict()  # as in a checkpoint: all units are sharded again
    for unit in [*model.model.layers, model]:
        unit.reshard()
    averages = [value for values in optimizer.state.values() for name, value in values.items() if name != "step"]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    held = sum(part.to_local().nbytes for part in [*model.parameters(), *gradients, *averages])
    assert held == ((2 if half else 4) * frozen + 16 * trained) / processes


SIZES = {"1B": gpt.SIZES["gpt_1b"]._replace(vocabulary=128256),
         "8B": gpt.Size(4096, 32, 32, 8, 14336, tied=False, vocabulary=128256),
         "70B": gpt.Size(8192, 80, 64, 8, 28672, tied=False, vocabulary=128256)}


def test_the_table_of_memory_is_computed_by_the_formula():
    page = (ROOT / "language/README.md").read_text()
    rows = re.findall(r"^\| Llama [\d.]+ (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) GB \| ([\d.]+) GB \|$", page, re.M)
    assert [name for name, *_ in rows] == [*SIZES]
    for name, *found in rows:
        with torch.device("meta"):
            model = gpt.GPT(SIZES[name], 0)
            frozen = sum(parameter.numel() for parameter in model.parameters())
            trained = sum(each.numel() for each in lora.Adapters(model, 16, 32, lora.TARGETS, 0).parameters())
        expected = frozen / 1e9, trained / 1e6, 16 * frozen / 1e9, (2 * frozen + 16 * trained) / 1e9
        assert [*map(float, found)] == pytest.approx(expected, rel=0.01), expected
