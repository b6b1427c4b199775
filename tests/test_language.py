"""The language scripts, as launched: the same model on any number of processes, and a text at the end."""
import re
import shutil

import pytest
import torch
from conftest import FLOAT64, PROGRAMS, STRICT, command, distance, epochs, good, load, run, same, whole_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common import dcp_folders
from common.errors import ProcessError, UsageError
from language import experts, gpt, llama, text

# 13 windows for validation: no number of processes divides them
OPTIONS = ["--epochs", "2", "--batch-size", "24", "--windows", "104", "--length", "32", "--seed", "3", "--save-every",
           "1", "--warmup-steps", "5", "--document-mask", "--sample", ""]
CLIP, EXPERTS, SAMPLE = ["--clip-norm", "0.5"], ["--model", "moe_tiny"], ["--sample", "def "]
TINY = ["--model", str(PROGRAMS / "tiny_llama")]  # these windows are long, and gpt_tiny is slow in float64
PAIRS = [*TINY, "--length", "128", "--windows", "52", "--batch-size", "12"]  # a window has a function or a few
GROUPS = [*TINY, "--length", "96", "--windows", "24", "--batch-size", "12", "--group", "4", "--max-new", "8",
          "--updates", "2"]
STARTS = {
    "one": ("train.py", 1, *SAMPLE), "one, clipped": ("train_TP.py", 1, *CLIP),
    "two": ("train_DDP.py", 2), "three": ("train_DDP.py", 3),
    "tensor 2": ("train_TP.py", 2), "data 3": ("train_TP.py", 3),
    "data 2, tensor 2": ("train_TP.py", 4, *CLIP),
    "context 2": ("train_CP.py", 2), "context 4": ("train_CP.py", 4, "--context-parallel", "4"),
    "data 2, context 2": ("train_CP.py", 4),
    "context 2, tensor 2": ("train_CP.py", 4, "--tensor-parallel", "2", *SAMPLE),
    "pipeline 2": ("train_4D.py", 2), "pipeline 2, clipped": ("train_4D.py", 2, *CLIP),
    "interleaved": ("train_4D.py", 2, "--chunks", "2"),
    "pipeline 2, data 2": ("train_4D.py", 4, "--context-parallel", "1", *CLIP),
    "pipeline 2, context 2": ("train_4D.py", 4, "--micro-batches", "2"),
    "pipeline 2, tensor 2": ("train_4D.py", 4, "--tensor-parallel", "2"),
    "pipeline 4, tensor 2": ("train_4D.py", 8, "--pipeline-parallel", "4", "--tensor-parallel", "2"),
    "three of four": ("train_4D.py", 8, "--tensor-parallel", "2"),
    "four": ("train_4D.py", 16, "--tensor-parallel", "2", "--context-parallel", "2"),
    "one, experts": ("train.py", 1, *EXPERTS), "experts copied": ("train_DDP.py", 2, *EXPERTS),
    "experts of 1 group": ("train_EP.py", 2, *EXPERTS), "experts of 2 groups": ("train_EP.py", 4, *EXPERTS),
    "experts, compiled": ("train_EP.py", 2, *EXPERTS, "--compile"),
    "experts of 8 groups": ("train_EP.py", 8, "--tensor-parallel", "1", *EXPERTS),
    "combined": ("train_combined.py", 2, "--precision", "fp32", "--accum-steps", "5", "--snapshot-every", "3"),
    "sharded": ("train_FSDP.py", 2), "sharded, clipped": ("train_FSDP.py", 3, *CLIP),
    "one, pairs": ("train_SFT.py", 1, *PAIRS), "pairs of 2": ("train_SFT.py", 2, *PAIRS, "--accum-steps", "3"),
    "pairs of 3": ("train_SFT.py", 3, *PAIRS),
    "pairs of 4": ("train_SFT.py", 4, *PAIRS, "--accum-steps", "3", "--activation-checkpointing", "--replicas", "2"),
    "one, adapters": ("train_LoRA.py", 1, *PAIRS),
    "adapters of 2": ("train_LoRA.py", 2, *PAIRS, "--accum-steps", "3"), "adapters of 3": ("train_LoRA.py", 3, *PAIRS),
    "adapters of 4": ("train_LoRA.py", 4, *PAIRS, "--accum-steps", "3", "--activation-checkpointing", "--replicas",
                      "2"),
    "one, adapters, clipped": ("train_LoRA.py", 1, *PAIRS, *CLIP),
    "adapters, clipped": ("train_LoRA.py", 3, *PAIRS, *CLIP, "--reshard-after-forward", "no"),
    "one, preferences, clipped": ("train_DPO.py", 1, *PAIRS, *CLIP),
    "preferences of 2": ("train_DPO.py", 2, *PAIRS, *CLIP, "--accum-steps", "3"),
    "preferences of 3": ("train_DPO.py", 3, *PAIRS, *CLIP),
    "preferences of 4": ("train_DPO.py", 4, *PAIRS, *CLIP, "--accum-steps", "3", "--activation-checkpointing",
                         "--replicas", "2"),
    "one, groups": ("train_GRPO.py", 1, *GROUPS),
    "groups of 2": ("train_GRPO.py", 2, *GROUPS, "--accum-steps", "3"), "groups of 3": ("train_GRPO.py", 3, *GROUPS),
    "groups of 4": ("train_GRPO.py", 4, *GROUPS, "--accum-steps", "3", "--activation-checkpointing", "--replicas", "2")}
DAILY = ["two", "combined", "sharded", "tensor 2", "context 2", "pipeline 2"]
# by day, only their launch
DRILLS = ["experts of 1 group", "pairs of 2", "adapters of 2", "preferences of 2", "groups of 2"]
OTHERS = [name for name in STARTS if name not in [*DAILY, *DRILLS] and not name.startswith("one")]


def words(name):
    """Return the command of a run in STARTS."""
    script, processes, *options = STARTS[name]
    options = [*OPTIONS, *options]
    if script in ("train_SFT.py", "train_LoRA.py", "train_DPO.py", "train_GRPO.py"):
        options.remove("--document-mask")  # they need no such choice
    return [*command(f"language/{script}", processes), *options]


@pytest.fixture(scope="module")
def trained(once):
    """Return a function that runs a script once, in float64: name to (folder, result).

    The folders that train_4D.py saves, 4 and 8 steps, are also converted to the files that the other scripts save.
    """
    def train(name):
        script = STARTS[name][0]

        def make(folder):
            start = ["--weights", writer(folder / "writer.pt")] if script == "train_GRPO.py" else []
            result = run(*words(name), *start, "--output-dir", folder, env=STRICT | FLOAT64)
            for steps, file in ((4, "epoch-001.pt"), (8, "last.pt")) if script == "train_4D.py" else ():
                dcp_folders.main(folder / f"step-{steps:07}", folder / file)
            return result

        return once(f"language {name}", make)

    return train


def writer(path):
    """Save weights that write a few signs, so that some answers end, some parse, and some do neither."""
    torch.manual_seed(0)
    model = gpt.GPT(llama.size(TINY[1]), 256)
    weight = model.model.embed_tokens.weight.data
    weight[:, 0] += 0.1  # so for any text, the last layer's input is large there
    weight[[*b"a1=\n\0"], 0] += 0.75
    torch.save({"model": model.state_dict()}, path)
    return path


def agree(left, right):
    """Assert that two checkpoints have the same weights, AdamW states and score, except for rounding."""
    assert distance(left, right) < 1e-11
    left, right = load(left), load(right)
    assert left["warmup"] == right["warmup"] == {"done": 8} and left["score"] == pytest.approx(right["score"], rel=1e-9)
    assert left["optimizer"]["state"].keys() == right["optimizer"]["state"].keys()
    for number, values in left["optimizer"]["state"].items():
        for key, value in values.items():
            other = right["optimizer"]["state"][number][key]  # `step` is float64 after a resume: FLOAT64 casts it
            assert torch.allclose(value.double(), other.double(), rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("name", [
    *DAILY, *(pytest.param(name, marks=pytest.mark.drill) for name in DRILLS),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_trains_the_model_of_one_process(trained, name):
    kinds = ", experts", ", pairs", ", adapters", ", preferences", ", groups"
    kind = next((kind for kind in kinds if kind[2:] in name), "")
    kind += ", clipped" if "--clip-norm" in STARTS[name] else ""
    one, said = trained("one" + kind)
    several, said_too = trained(name)
    assert distance(one / "epoch-001.pt", one / "last.pt") > 1e-3
    agree(one / "last.pt", several / "last.pt")
    shown = [[re.sub(r"[\d.]+ s .*", "", line) for line in said_here.splitlines()
              if not line.startswith(("no sample", "weights "))] for said_here in (said.out, said_too.out)]
    assert shown[1][1:] == shown[0][1:len(shown[1])] and len(shown[1]) > 2


def test_the_model_learns_and_writes(trained):
    folder, said = trained("one")
    out, shown = said.out, epochs(said.out)
    assert load(folder / "best.pt")["score"] == pytest.approx(-min(line["val_loss"] for line in shown), abs=1e-4)
    bits = [float(number) for number in re.findall(r"bits ([\d.]+)", out)]
    assert 8.5 > bits[0] > bits[1] > 0 and re.search(r"stdlib: [\d,]+ tokens \(sha256 [\da-f]{8}\)", out)
    assert out.partition("tokens/s\n")[2].partition("tokens/s\n")[2].startswith("def ")


def test_the_rate_that_is_shown_is_that_of_the_last_step(trained):
    """The warm-up takes five steps, and the first epoch has four."""
    assert [line["lr"] for line in epochs(trained("one")[1].out)] == pytest.approx([2e-3 * 4 / 5, 1.01e-3], abs=1e-5)


def test_what_the_model_writes_cannot_control_a_terminal():
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Size(16, 1, 4, 2, 24), 256)
    model.positions = part = torch.arange(8)
    said = gpt.write(model, "a\t\n", 200, 16, seed=0)
    assert model.positions is part  # a text is written from whole windows; training goes on with parts
    assert said.startswith("a\t\n") and len(said) > 50
    assert all(sign.isprintable() or sign in "\n\t" for sign in said)


@pytest.mark.nightly
@pytest.mark.parametrize(("before", "after"), [
    ("one", "three of four"), ("pipeline 2, context 2", "one"), ("pipeline 4, tensor 2", "context 2"),
    ("one, experts", "experts of 2 groups"), ("experts of 1 group", "one, experts"), ("one, pairs", "pairs of 2"),
    ("adapters of 3", "one, adapters"), ("one, adapters", "adapters of 2"),
    ("one, preferences, clipped", "preferences of 2"),
    ("one, groups", "groups of 2")])
def test_a_checkpoint_fits_any_mesh(trained, tmp_path, before, after):
    good(run(*words(after), "--output-dir", tmp_path, "--resume", trained(before)[0] / "epoch-001.pt", env=FLOAT64))
    if STARTS[after][0] == "train_4D.py":
        whole_file(tmp_path / "step-0000008", tmp_path / "last.pt")
    assert distance(tmp_path / "last.pt", trained(before)[0] / "last.pt") < 1e-11


MESHES = {"one": (1,), "pipeline 2": (2,), "context 2, tensor 2": (4, "--pipeline-parallel=1", "--tensor-parallel=2"),
          "data 2, tensor 2": (4, "--pipeline-parallel=1", "--tensor-parallel=2", "--context-parallel=1"),
          "interleaved, tensor 2": (4, "--tensor-parallel=2", "--chunks=2")}


@pytest.mark.nightly
@pytest.mark.parametrize(("before", "after"), [
    ("pipeline 2", "one"), ("pipeline 2", "data 2, tensor 2"), ("context 2, tensor 2", "pipeline 2"),
    ("one", "interleaved, tensor 2"), ("interleaved, tensor 2", "one")])
def test_a_folder_fits_any_mesh(trained, once, tmp_path, before, after):
    """A run stops in the middle of its last epoch, continues on another mesh, and ends as one process does."""
    def start(mesh, folder):
        processes, *options = MESHES[mesh]
        return run(*command("language/train_4D.py", processes), *OPTIONS, *options, "--snapshot-every", "2",
                   "--resume", "auto", "--output-dir", folder, env=STRICT | FLOAT64)

    (one, said), (folder, _) = trained("one"), once(f"folder, {before}", lambda folder: start(before, folder))
    shutil.copytree(folder / "snapshot-0000006", tmp_path / "snapshot-0000006")
    assert epochs(good(start(after, tmp_path)).out) == epochs(said.out)[1:]
    whole_file(tmp_path / "step-0000008", tmp_path / "last.pt")
    agree(one / "last.pt", tmp_path / "last.pt")


@pytest.mark.nightly
def test_experts_that_cannot_be_divided_are_named(tmp_path):
    code, _, said = run(*command("language/train_EP.py", 3), *OPTIONS, *EXPERTS, "--output-dir", tmp_path)
    assert code and "error: --model: number of experts 8: not a multiple of the 3 processes that divide it\n" in said


@pytest.mark.nightly
def test_a_resumed_run_ends_as_the_whole_run_bit_for_bit(trained, tmp_path):
    folder, _ = trained("two")
    good(run(*command("language/train_DDP.py"), *OPTIONS, "--output-dir", tmp_path, "--workers", "1", "--resume",
             folder / "epoch-001.pt", env=FLOAT64))
    whole, resumed = load(folder / "last.pt"), load(tmp_path / "last.pt")
    for content in (whole, resumed):
        for values in content["optimizer"]["state"].values():
            values["step"] = values["step"].double()  # FLOAT64 casts it on resume
    assert same(whole, resumed)


def test_windows_depend_on_seed_and_epoch_and_labels_are_the_next_tokens(tmp_path):
    (tmp_path / "one.txt").write_text("".join(map(chr, range(1, 120))) * 40)
    train, val = text.create_datasets("text", tmp_path / "one.txt", 16, 64, seed=1)
    again, _ = text.create_datasets("text", tmp_path / "one.txt", 16, 64, seed=1)
    train.set_epoch(2), again.set_epoch(2)
    inputs, targets = train.__getitems__(range(64))
    assert inputs.shape == targets.shape == (64, 16) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, again.__getitems__(range(64))[0])
    again.set_epoch(3)
    assert not torch.equal(inputs, again.__getitems__(range(64))[0])
    starts = val.starts.clone()
    val.set_epoch(5)
    assert torch.equal(starts, val.starts) and len(val) == 8 and starts.diff().min() >= 16
    assert starts[-1] + 16 < len(val.tokens)
    whole = train.tokens.tobytes()[:-1] + val.tokens.tobytes()[:-1]  # each part ends with the end of a document
    assert whole == (tmp_path / "one.txt").read_bytes()


def test_thestandard_library_is_its_code_in_one_order(tmp_path, monkeypatch):
    for file in ("b.py", "a/c.py", "a/readme.txt", "test/d.py", "a/tests/e.py", "site-packages/f.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": tmp_path})
    assert text.standard_library() == [b"a/c.py", b"b.py"]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("text", {"a.txt": b"short"}, "training text has only 5 tokens"), ("text", {}, "No such file"),
    ("text", {"a.txt": b"\xff" * 900}, "a.txt: .*decode"), ("tokens", {"train.bin": bytes(range(200)) * 9}, "val.bin"),
    ("tokens", {"train.bin": b"\1\2\3", "val.bin": b"\1\2"}, "train.bin")])
def test_wrong_data_is_explained(tmp_path, name, content, message):
    for file, data in content.items():
        (tmp_path / file).write_bytes(data)
    with pytest.raises(UsageError, match=message):
        text.create_datasets(name, tmp_path if name == "tokens" else tmp_path / "a.txt", 16, 64, seed=1)


def test_a_token_beyond_the_vocabulary_is_explained(tmp_path):
    for part in ("train", "val"):
        torch.tensor([1, 2, 50257] * 33, dtype=torch.uint16).numpy().tofile(tmp_path / f"{part}.bin")
    train, _ = text.create_datasets("tokens", tmp_path, 16, 4, seed=1)
    with pytest.raises(ProcessError, match="has token 50257, and the vocabulary ends at 50256"):
        train[0]


def test_a_token_goes_to_its_experts_and_gets_the_sum_of_what_they_say():
    torch.manual_seed(0)
    size = gpt.Size(16, 1, 4, 2, 24, experts=6, active=3)
    mlp, x = gpt.Block(size).mlp.double(), torch.randn(2, 5, 16, dtype=torch.float64)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for token, found in zip(x.flatten(0, 1), mlp(x).flatten(0, 1)):
        scores = (mlp.gate.weight @ token).sigmoid()
        chosen = (scores + mlp.gate.e_score_correction_bias).topk(3).indices
        expected = 0
        for number in chosen:
            gate, up = (mlp.experts.gate_up_proj[number] @ token).chunk(2)
            down = mlp.experts.down_proj[number]
            expected += scores[number] / scores[chosen].sum() * (down @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(found, expected)


def test_the_load_of_experts_evens_out_and_the_loss_does_not_count_for_it():
    torch.manual_seed(0)
    mixture, x = experts.Mixture(16, 24, 8, 2), torch.randn(4, 50, 16) + 0.5
    for parameter in [mixture.gate.weight, *mixture.experts.parameters()]:
        torch.nn.init.normal_(parameter, std=0.2)
    optimizer = torch.optim.AdamW([mixture.gate.e_score_correction_bias], 2e-3)
    busiest = []
    for _ in range(200):
        optimizer.zero_grad()
        busiest.append((mixture.gate(x) > 0).float().mean((0, 1)).max() / 2)  # of the tokens; 1 / 8 is even
        (0 * mixture(x).sum()).backward()
        optimizer.step()
    assert busiest[0] > 0.2 and busiest[-1] < 0.15


def test_a_masked_document_does_not_see_the_one_before_it():
    torch.manual_seed(0)
    size = gpt.Size(16, 2, 4, 2, 24)
    model = gpt.GPT(size, 9, end=0).double()
    one, two = torch.tensor([[3, 4, 5, 0]]), torch.tensor([[6, 7, 8, 2, 1]])
    both = torch.cat([one, two], 1)
    torch.testing.assert_close(model(both)[:, 4:], model(two))  # rotary positions are relative
    changed = both.clone()
    changed[0, 6] = 1
    for model.end in (0, None):
        torch.testing.assert_close(model(changed)[:, :6], model(both)[:, :6])  # no token sees a later one
    assert (model(both)[:, 4:] - model(two)).abs().max() > 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_the_operations_are_those_that_torch_counts(tied):
    size = gpt.Size(32, 2, 4, 2, 48, tied=tied)
    model, tokens = gpt.GPT(size, 61), torch.randint(61, (3, 24))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it misses the CPU's kernel
        gpt.loss(model(tokens), tokens).backward()
    assert counter.get_total_flops() == gpt.operations(model, 24) * tokens.numel()


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12), ("NVIDIA GeForce RTX 4090", 165e12),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA A10", None)])
def test_the_peak_is_that_of_the_device(name, peak):
    assert gpt.find_peak(name) == peak
