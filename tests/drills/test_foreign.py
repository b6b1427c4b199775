"""verify on programs from outside this repository: no false alarm, and the right cause of typical bugs.

Each program in tests/programs/foreign, and each example of docs/your-own-loop.md, trains the same model on one process
and on two. Each bug replaces lines of the program that runs on two processes, as people write them by mistake.
"""
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import PROGRAMS, ROOT, replace_lines

import verify.__main__ as command_line

pytestmark = pytest.mark.long
FOREIGN, EXAMPLES = PROGRAMS / "foreign", ROOT / "docs/examples"
PAGE = " ".join((ROOT / "docs/your-own-loop.md").read_text().split())
EXTRAS = {"fabric_mlp": "lightning_fabric", "accelerate_classifier": "accelerate"}

# How to start a program on one process and on two; {} is its path
TWO = "torchrun --nproc-per-node=2 {}"
COMMANDS = {
    "trainer": ("python {}", TWO),
    "regression": ("python {}", TWO),
    "fabric_mlp": ("python {} --devices 1", "python {} --devices 2"),
    "accelerate_classifier": ("python {}", TWO),
    "accumulation": ("python {} --accum-steps 4", TWO + " --accum-steps 2"),
    "evaluated": ("python {}", TWO),
    "megatron": ("python {}", TWO),
    "experts": ("python {}", TWO),
    "context": ("python {}", TWO),
    "measured": ("python {}", TWO),
    "mixed": ("python {} --nprocs 1", "python {} --nprocs 2"),
    "schedule": ("python {}", TWO),
    "tokens": ("python {}", TWO),
    "weighted_auc": ("python {}", TWO),
    "stream": ("python {}", TWO),
    "two_optimizers": ("python {}", TWO),
}

# The cause that verify must name, the program, and the lines that people write instead of the right ones
BUGS = {
    "every rank reads the same": ("samples", "trainer", [
        ("    sampler = DistributedSampler(dataset, num_replicas=WORLD_SIZE, rank=GLOBAL_RANK)\n", ""),
        ("sampler=sampler", "shuffle=True"), ("        self.train_data.sampler.set_epoch(epoch)\n", "")]),
    "no set_epoch": ("set-epoch", "trainer", [("        self.train_data.sampler.set_epoch(epoch)\n", "")]),
    "the module instead of DDP": ("not-averaged", "trainer", [("self.model(source)", "self.model.module(source)")]),
    "a batch for each process": ("batch-size", "trainer", [("batch_size // WORLD_SIZE", "batch_size")]),

    "other weights on each rank": ("start", "regression", [
        ("torch.manual_seed(0)", "torch.manual_seed(rank)"), ("share_weights(model)\n    x", "pass\n    x")]),
    "gradients summed": ("scale", "regression", [("        parameter.grad /= world_size\n", "")]),

    "the model before setup": ("not-averaged", "fabric_mlp", [("model(x)", "mlp(x)")]),

    "backward without the accelerator": ("scale", "accelerate_classifier", [
        ("accelerator.backward(loss)", "loss.backward()")]),

    "micro-batches summed": ("scale", "accumulation", [("            loss = loss / args.accum_steps\n", "")]),
    "no_sync for all micro-batches": ("not-averaged", "accumulation", [("if ddp and not last else", "if ddp else")]),
    "clipped in each micro-batch": ("clip", "accumulation", [
        ("        if last:\n            nn.utils.clip", "        nn.utils.clip"),
        ("            optimizer.step()\n", "        if last:\n            optimizer.step()\n")]),
    "no weight decay": ("optimizer", "accumulation", [("betas=(0.9, 0.95)", "betas=(0.9, 0.95), weight_decay=0")]),

    "BatchNorm of each process": ("batchnorm", "evaluated", []),
    "no train() after an evaluation": ("evaluation", "evaluated", [("            model.train()\n", "")]),
    "dropout drawn on each rank": ("random", "evaluated", []),

    # NeMo Automodel 1260
    "no sum in the backward pass": ("partial", "megatron", [("return add(grad.contiguous().clone())", "return grad")]),
    # DeepSpeed 1801
    "each rank clips by its own shards": ("clip", "megatron", [
        ("(add(own.clone()) + copies).sqrt()", "(own + copies).sqrt()")]),
    # Megatron-LM 7452
    "copies counted on every rank": ("clip", "megatron", [("add(own.clone()) + copies", "add(own + copies)")]),

    # Megatron-LM 5956, pytorch 160285
    "gradients of experts not divided": ("group-scale", "experts", [("model.experts.grad /= world", "pass")]),
    # transformers 48205
    "parts of the router's gradient not added": ("partial", "experts", [
        ("                dist.all_reduce(parameter.grad)\n",
         "                dist.all_reduce(parameter.grad) if 'router' not in name else None\n")]),
    # NeMo Automodel 2995
    "the router gets no gradient": ("no-gradient", "experts", [(".softmax(1)\n", ".softmax(1).detach()\n")]),

    # accelerate 76: a gather without a backward pass; only the own part keeps its gradient
    "keys gathered without their gradient": ("no-backward", "context", [
        ("        grad = grad.clone()\n        dist.all_reduce(grad)\n", "")]),
    "positions from 0 on every rank": ("forward", "context", [(" + RANK * tokens.shape[1]\n", "\n")]),
    "the mask not shifted": ("forward", "context", [("first = RANK * x.shape[1]", "first = 0")]),
    # SkyRL 1420, verl 4250
    "loss divided by the context size": ("scale", "context", [("loss.backward()", "(loss / SIZE).backward()")]),
    # transformers 48167
    "the loss shown is that of all ranks together": ("metric", "context", [("            total /= SIZE\n", "")]),

    # mmdetection 4582, pytorch 22192
    "buffers of rank 0's share": ("buffers", "measured", [
        ("            dist.all_reduce(mean)\n            mean /= world\n", "            pass\n")]),
    "the average on rank 0": ("buffers", "measured", [
        ("            average.update", "            if rank == 0:\n                average.update")]),
    # accelerate 575, rf-detr 1507
    "padding counts in the evaluation": ("metric", "measured", [
        ("range(rank, len(val_set), world)", "DistributedSampler(val_set, world, rank, shuffle=False)")]),
    # torchtitan 3329
    "the loss shown is one rank's part": ("metric", "measured", [("dist.all_reduce(sums)", "pass")]),
    # accelerate 2665
    "the optimizer holds other parameters": ("no-gradient", "measured", [
        ("Adam(net.parameters()", "Adam([nn.Parameter(each.detach().clone()) for each in net.parameters()]")]),
    # pytorch 104336
    "a parameter replaced after the wrap": ("not-averaged", "measured", [
        ("    average = Av", "    net.layers[0].weight = nn.Parameter(net.layers[0].weight.detach().clone())\n"
         "    average = Av")]),

    # transformers 37474
    "the mean of DDP not undone": ("scale", "tokens", [("loss_sum * world_size / count", "loss_sum / count")]),
    # prime-rl 2358
    "each rank's own count as the scale": ("uneven-mean", "tokens", [("            dist.all_reduce(count)\n", "")]),

    "no seed": ("start", "mixed", [("    torch.manual_seed(100)\n", "")]),
    "clipped while scaled": ("clip", "mixed", [("            scaler.unscale_(optimizer)\n", "")]),
    "clipped at another norm": ("clip", "mixed", [("max_norm=1.0", "max_norm=1.0 / world_size")]),

    "early stopping on rank 0": ("rank-stops", "schedule", [("        if stop:", "        if rank == 0 and stop:")]),
}
# The same of the examples: the page names the wrong line and the cause, which must be right
SHOWN = {
    "schedule": ("rank-lr", "plateau.step(val_loss)", "if rank == 0: plateau.step(val_loss)"),
    "tokens": ("uneven-mean", "dist.all_reduce(count)", "count = count * world_size"),
    "weighted_auc": ("samples", "generator.manual_seed(1000 * SEED + epoch)",
                     "generator.manual_seed(1000 * SEED + epoch + rank)"),
    "stream": ("samples", "yield from batch[self.rank::self.world_size]",
               "yield from batch[:BATCH_SIZE // self.world_size]"),
    "two_optimizers": ("not-averaged", "fake = parallel_generator(noise)", "fake = generator(noise)"),
}
BUGS |= {f"the one of {name}.py": (cause, name, [(right, wrong)]) for name, (cause, right, wrong) in SHOWN.items()}
OPTIONS = {"micro-batches summed": " --max-norm 100", "BatchNorm of each process": " --batch-norm",
           "dropout drawn on each rank": " --dropout 0.2"}


def installed(program):
    return program not in EXTRAS or importlib.util.find_spec(EXTRAS[program]) is not None


def need(program):
    if program in EXTRAS:
        pytest.importorskip(EXTRAS[program], reason=f"no {EXTRAS[program]}: pip install -r requirements-bench.txt")


def source(program):
    return (EXAMPLES if program in SHOWN else FOREIGN) / f"{program}.py"


def put_in(bug, folder):
    """Copy a program with a bug's wrong lines into a folder; return the commands to compare."""
    _, program, replacements = BUGS[bug]
    one, two = (command + OPTIONS.get(bug, "") for command in COMMANDS[program])
    replace_lines(Path(shutil.copy(source(program), folder)), dict(replacements))
    return one.format(source(program)), two.format(folder / f"{program}.py")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Return a function that gives two commands to verify's command line: (exit code, JSON report).

    A baseline that has several bugs is recorded once for all of them.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("OMP_NUM_THREADS", "1")
    record, recorded, turn = command_line.record, {}, {}

    def record_once(command, folder, *more, **options):
        repeated = turn["commands"].count((command, str(options)))
        turn["commands"].append((command, str(options)))
        key = command, str(options), repeated
        if str(ROOT) not in command:
            return record(command, folder, *more, **options)
        if key not in recorded:
            kept = tmp_path_factory.mktemp("recorded") / "run"
            recorded[key] = record(command, kept, *more, **options), kept
        shutil.copytree(recorded[key][1], folder, dirs_exist_ok=True)
        return recorded[key][0]

    def ask(*commands):
        turn["commands"] = []
        report = tmp_path_factory.mktemp("report") / "report.json"
        patch.setattr(sys, "argv", ["verify", "--timeout", "300", "--json", str(report), *commands])
        code = command_line.main()
        return code, json.loads(report.read_text())

    patch.setattr(command_line, "record", record_once)
    yield ask
    patch.undo()


@pytest.fixture(scope="module")
def answer(ask, tmp_path_factory):
    """Return a function that runs verify on each bug once: bug to (exit code, JSON report)."""
    answers = {}

    def get(bug):
        if bug not in answers:
            answers[bug] = ask(*put_in(bug, tmp_path_factory.mktemp("bug")))
        return answers[bug]

    return get


@pytest.mark.parametrize("program", COMMANDS)
def test_a_correct_program_raises_no_alarm(ask, program):
    need(program)
    code, report = ask(*(command.format(source(program)) for command in COMMANDS[program]))
    assert (code, report["verdict"], report["cause"]) == (0, "same", None), report
    assert report["ranks"] == [1, 2] and min(report["steps"]) >= 16


def test_the_minimal_pair_raises_no_alarm(ask, tmp_path):
    options = f"--device cpu --output {tmp_path / 'best.pt'}"
    one, two = (f"{ROOT}/minimal/{name}.py {options}" for name in ("train", "train_DDP"))
    code, report = ask(f"python {one}", TWO.format(two))
    assert (code, report["verdict"]) == (0, "same"), report


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(answer, bug):
    """If equal models print different metrics, verify only adds a note."""
    need(BUGS[bug][1])
    code, report = answer(bug)
    noted = BUGS[bug][0] == "metric" and report["notes"]
    assert (code, report["verdict"]) == ((0, "same") if noted else (1, "different")), report


@pytest.mark.parametrize("program", SHOWN)
def test_the_page_names_the_cause_of_the_mistake_that_an_example_avoids(answer, program):
    cause, _, wrong = SHOWN[program]
    said = PAGE.split(f"on [`{program}.py`]")[1].split("## ")[0]
    assert f"`{wrong}`" in said and f"`{cause}`" in said
    assert answer(f"the one of {program}.py")[1]["cause"] == cause


def test_nine_causes_of_ten_are_right(answer):
    asked = [bug for bug, (_, program, _) in BUGS.items() if installed(program)]
    named = {bug: answer(bug)[1]["cause"] or "metric" * bool(answer(bug)[1]["notes"]) for bug in asked}
    wrong = {bug: f"{named[bug]}, not {BUGS[bug][0]}" for bug in asked if named[bug] != BUGS[bug][0]}
    print(f"{len(asked) - len(wrong)} of {len(asked)} causes are right", wrong)
    assert len(wrong) <= len(asked) // 10, wrong
