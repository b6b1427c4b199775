"""verify.py on programs that do not know this repository: no false alarm, and the right cause of a typical bug.

Each program in tests/programs/foreign trains the same model on one process and on two. Each bug replaces lines of the
program that runs on two processes, as people write them by mistake.
"""
import importlib.util
import json
import shutil
import sys

import pytest
from conftest import PROGRAMS

import verify

pytestmark = pytest.mark.long
FOREIGN = PROGRAMS / "foreign"
EXTRAS = {"fabric_mlp": "lightning_fabric", "accelerate_classifier": "accelerate"}

# How to start a program on one process and on two
TWO = "torchrun --nproc-per-node=2 {}"
COMMANDS = {
    "trainer": ("python {}", TWO),
    "regression": ("python {}", "torchrun --nproc-per-node=2 {}_ddp"),
    "fabric_mlp": ("python {} --devices 1", "python {} --devices 2"),
    "accelerate_classifier": ("python {}", TWO),
    "gan": ("python {}", TWO),
    "accumulation": ("python {} --accum-steps 4", TWO + " --accum-steps 2"),
    "language_model": ("python {}", TWO),
    "cnn": ("python {}", TWO),
    "spawned": ("python {} --nprocs 1", "python {} --nprocs 2"),
    "plateau": ("python {}", TWO),
    "evaluated": ("python {}", TWO),
    "float32": ("python {}", TWO),
    "mixed": ("python {}", TWO),
}

# The cause that verify.py must name, the program, and the lines that people write instead of the right ones
BUGS = {
    "every rank reads the same": ("samples", "trainer", [
        ("    sampler = DistributedSampler(dataset, num_replicas=WORLD_SIZE, rank=GLOBAL_RANK)\n", ""),
        ("sampler=sampler", "shuffle=True"), ("        self.train_data.sampler.set_epoch(epoch)\n", "")]),
    "no set_epoch": ("set-epoch", "trainer", [("        self.train_data.sampler.set_epoch(epoch)\n", "")]),
    "the module instead of DDP": ("not-averaged", "trainer", [("self.model(source)", "self.model.module(source)")]),
    "a batch for each process": ("batch-size", "trainer", [("batch_size // WORLD_SIZE", "batch_size")]),

    "other weights on each rank": ("start", "regression", [
        ("torch.manual_seed(0)", "torch.manual_seed(dist.get_rank())"), ("    share_weights(model)\n", "")]),
    "gradients summed": ("scale", "regression", [("        parameter.grad /= dist.get_world_size()\n", "")]),

    "the model before setup": ("not-averaged", "fabric_mlp", [("model(x)", "mlp(x)")]),

    "backward without the accelerator": ("scale", "accelerate_classifier", [
        ("accelerator.backward(loss)", "loss.backward()")]),

    "one of two networks without DDP": ("not-averaged", "gan", [("    netD = DistributedDataParallel(netD)\n", "")]),

    "micro-batches summed": ("scale", "accumulation", [("            loss = loss / args.accum_steps\n", "")]),
    "no_sync for all micro-batches": ("not-averaged", "accumulation", [("if ddp and not last else", "if ddp else")]),
    "clipped in each micro-batch": ("clip", "accumulation", [
        ("        if last:\n            nn.utils.clip", "        nn.utils.clip"),
        ("            optimizer.step()\n", "        if last:\n            optimizer.step()\n")]),

    "mean over each rank's tokens": ("uneven-mean", "language_model", [
        ('reduction="sum"', 'reduction="mean"'), ("loss_sum / tokens * world_size", "loss_sum")]),
    "the schedule on rank 0": ("rank-lr", "language_model", [
        ("            scheduler.step()\n", "            if rank == 0:\n                scheduler.step()\n")]),

    "BatchNorm of each process": ("batchnorm", "cnn", []),
    "no weight decay": ("unknown", "cnn", [(", weight_decay=1e-4", "")]),

    "no seed": ("start", "spawned", [("    torch.manual_seed(0)\n", "")]),

    "the plateau on rank 0": ("rank-lr", "plateau", [
        ("        scheduler.step(val_loss)\n", "        if rank == 0:\n            scheduler.step(val_loss)\n")]),
    "early stopping on rank 0": ("rank-stops", "plateau", [("if stopper.", "if rank == 0 and stopper.")]),

    "no train() after an evaluation": ("evaluation", "evaluated", [("            model.train()\n", "")]),
    "dropout drawn on each rank": ("random", "evaluated", []),

    "no set_epoch in float32": ("set-epoch", "float32", [("        sampler.set_epoch(epoch)\n", "")]),
    "clipped while scaled": ("clip", "mixed", [("            scaler.unscale_(optimizer)\n", "")]),
    "clipped at another norm": ("clip", "mixed", [("max_norm=1.0", "max_norm=1.0 / world")]),
}
OPTIONS = {"micro-batches summed": " --max-norm 100", "BatchNorm of each process": " --norm batch",
           "dropout drawn on each rank": " --dropout 0.2"}


def installed(program):
    return program not in EXTRAS or importlib.util.find_spec(EXTRAS[program]) is not None


def need(program):
    if program in EXTRAS:
        pytest.importorskip(EXTRAS[program], reason=f"no {EXTRAS[program]}: pip install -r requirements-bench.txt")


def start(command, folder, program, options=""):
    return command.replace("{}_ddp", f"{folder / program}_ddp.py").replace("{}", f"{folder / program}.py") + options


def put_in(bug, folder):
    """Copy the program of a bug into a folder, with the wrong lines; return the commands to compare."""
    _, program, replacements = BUGS[bug]
    one, two = COMMANDS[program]
    name = f"{program}_ddp.py" if "_ddp" in two else f"{program}.py"
    text = (FOREIGN / name).read_text()
    for right, wrong in replacements:
        assert text.count(right) == 1, f"{name} must contain once: {right}"
        text = text.replace(right, wrong)
    (folder / name).write_text(text)
    options = OPTIONS.get(bug, "")
    return start(one, FOREIGN, program, options), start(two, folder, program, options)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Return a function that gives two commands to verify.py's command line: (exit code, JSON report).

    A baseline that has several bugs is recorded once for all of them.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("OMP_NUM_THREADS", "1")
    record, recorded, turn = verify.record, {}, {}

    def record_once(command, folder, *more, **options):
        repeated = turn["commands"].count((command, str(options)))
        turn["commands"].append((command, str(options)))
        key = command, str(options), repeated
        if str(FOREIGN) not in command:
            return record(command, folder, *more, **options)
        if key not in recorded:
            kept = tmp_path_factory.mktemp("recorded") / "run"
            recorded[key] = record(command, kept, *more, **options), kept
        shutil.copytree(recorded[key][1], folder)
        return recorded[key][0]

    def ask(*commands):
        turn["commands"] = []
        report = tmp_path_factory.mktemp("report") / "report.json"
        patch.setattr(sys, "argv", ["verify.py", "--timeout", "300", "--json", str(report), *commands])
        code = verify.main()
        return code, json.loads(report.read_text())

    patch.setattr(verify, "record", record_once)
    yield ask
    patch.undo()


@pytest.fixture(scope="module")
def answer(ask, tmp_path_factory):
    """Return a function that puts a bug in, once, and asks verify.py: bug to (exit code, JSON report)."""
    answers = {}

    def get(bug):
        if bug not in answers:
            answers[bug] = ask(*put_in(bug, tmp_path_factory.mktemp("bug")))
        return answers[bug]

    return get


@pytest.mark.parametrize("program", COMMANDS)
def test_a_correct_program_raises_no_alarm(ask, program):
    need(program)
    code, report = ask(*(start(command, FOREIGN, program) for command in COMMANDS[program]))
    assert (code, report["verdict"], report["cause"]) == (0, "same", None), report
    assert report["ranks"] == [1, 2] and min(report["steps"]) >= 16


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(answer, bug):
    need(BUGS[bug][1])
    code, report = answer(bug)
    assert (code, report["verdict"]) == (1, "different"), report


def test_nine_causes_of_ten_are_right(answer):
    asked = [bug for bug, (_, program, _) in BUGS.items() if installed(program)]
    wrong = {bug: f"{answer(bug)[1]['cause']}, not {BUGS[bug][0]}" for bug in asked
             if answer(bug)[1]["cause"] != BUGS[bug][0]}
    print(f"{len(asked) - len(wrong)} of {len(asked)} causes are right", wrong)
    assert len(wrong) <= len(asked) // 10, wrong
