"""verify names the step, parameter and cause of a difference in records of small loops, and of real commands."""
import json
import os
import re
import shlex
from pathlib import Path

import numpy
import pytest
import torch
from conftest import FROM_ROOT, PYTHON, ROOT, SAME, command, copy_out, good, replace_lines, run

import verify
from verify.comparing import Failure
from verify.difference import Difference
from verify.explaining import CAUSES as KNOWN
from verify.explaining import set_epoch
from verify.records import LEAVES, Run, equal, load, match
from verify.running import record
from verify.samples import described
from verify.tracing import after_backward, trace
from verify.values import draws_that_differ, first_value
from verify.watching import watch

HERE = Path(__file__).parent


# What the ranks of each mistake recorded: mistakes.py
CAUSES = {
    "weights of each rank": "start", "model instead of DDP": "not-averaged", "scheduler on rank 0": "rank-lr",
    "no set_epoch": "set-epoch", "set_epoch on rank 0": "set-epoch",
    "summed loss": "scale", "rate times 2": "learning-rate",
    "batch per process": "batch-size", "fewer epochs": "batch-size", "no sampler": "samples",
    "batchnorm left in eval": "evaluation", "batchnorm": "batchnorm", "mean over own tokens": "uneven-mean",
    "rank 0 stops": "rank-stops", "clip per rank": "clip", "functional dropout": "random", "weight decay": "optimizer",
    "decay of ranks": "optimizer", "equal rows by hand": "samples", "cut by hand, summed again": "group-scale",
    "parts of a gradient": "partial", "detached loss": "no-gradient", "one layer doubled": "group-scale",
    "mean without backward": "no-backward", "average on rank 0": "buffers", "buffer of a share": "buffers",
    "gradient flipped": "unknown", "gradients reset": "reset", "other values": "samples",
    "order of one process": "samples", "owned by ranks, not sent": "optimizer", "average of one epoch": "buffers",
    "gradients kept": "stale", "owned by ranks, gradients kept": "stale",
    "labels smoothed": "loss", "local SGD, copied": "not-averaged",
    "gathered loss": "no-backward",
    "lists, half of a batch": "samples", "lists, padding read": "uneven-mean", "rows by hand, from a buffer": "buffers",
    "batchnorm without backward": "no-backward", "joined, own mean": "uneven-mean", "joined, half of a batch": "loss",
    "augmented, no set_epoch": "set-epoch", "two loaders, own mean": "uneven-mean",
    "two loaders, one order": "set-epoch", "two loaders, taken, one order": "set-epoch",
    "two loaders, taken, own mean": "uneven-mean", "penalty, constant": "no-gradient",
    "penalty, attacked": "stale",
    "sharded, not reduced": "no-gradient", "sharded, clipped per rank": "no-backward", "sharded, half clipped": "clip",
    "weighted, own median": "evaluation", "weighted, own mean": "evaluation", "weighted, taught": "evaluation",
    "flat, decayed": "optimizer",
    "flat, not sent": "optimizer", "each sample, one dropped": "batch-size"}


STEPS = {"scheduler on rank 0": 7, "no set_epoch": 7, "set_epoch on rank 0": 7,
         "fewer epochs": 7, "batchnorm left in eval": 7, "rank 0 stops": 7,
         "decay of ranks": 2, "owned by ranks, not sent": 2, "gradients kept": 2, "owned by ranks, gradients kept": 2,
         "average of one epoch": 7,
         "rows by hand, from a buffer": 2, "augmented, no set_epoch": 7, "two loaders, one order": 7,
         "two loaders, own mean": 5, "two loaders, taken, one order": 7, "two loaders, taken, own mean": 5}


WATCHED = {"right": None, "rows by hand": None, "cut by hand": None, "batchnorm": None, "weights of each rank": "start",
           "model instead of DDP": "not-averaged", "scheduler on rank 0": "rank-lr", "no set_epoch": "set-epoch",
           "equal rows by hand": "samples", "rank 0 stops": "rank-stops", "detached loss": "not-optimized",
           "parts of a gradient": "not-averaged", "decay of ranks": "optimizer", "local SGD": None, "each sample": None,
           "local SGD, copied": "not-averaged", "augmented, no set_epoch": "set-epoch", "penalty": None,
           "owned by ranks, scheduler on rank 0": "rank-lr", "flat": None, "flat, not sent": "optimizer, never-moves"}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    folder = tmp_path_factory.mktemp("records")
    good(run(PYTHON, HERE / "mistakes.py", folder, env=FROM_ROOT))
    return folder


def of_one(records, mistake):
    """Return the record of one process that a mistake is compared with."""
    others = {"batchnorm left in eval": "batchnorm on 2", "average on rank 0": "average on 1",
              "average of one epoch": "average on 1", "gradient flipped": "right on 2"}
    names = others.get(mistake, f"{mistake} on 1"), f"{mistake.partition(',')[0]} on 1", "right on 1"
    return next(records / name for name in names if (records / name).exists())


def test_every_cause_has_a_mistake_that_shows_it():
    others = {"metric", "forward", "never-moves", "not-finite", "not-optimized"}  # of the command line, or of --watch
    assert {*CAUSES.values()} | others == {*KNOWN}


@pytest.mark.parametrize("way", ["right", "16 bits in the step", "rows by hand", "average", "owned by ranks",
                                 "batchnorm at rest", "fused", "cut by hand", "cut by hand, packed",
                                 "cut by hand, replicated", "lists", "joined", "augmented", "two loaders",
                                 "two loaders, taken", "penalty", "scaled", "sharded", "weighted", "flat",
                                 "averaged in a hook", "each sample"])
def test_two_ranks_train_the_model_of_one(records, way):
    one = "right" if "cut" in way or way in ("owned by ranks", "flat", "averaged in a hook") else way.split(",")[0]
    ranks = 4 if "replicated" in way else 2
    report = verify.compare(records / f"{one} on 1", records / f"{way} on {ranks}")
    assert (report["verdict"], report["steps"], report["ranks"]) == ("same", [12, 12], [1, ranks])
    assert 0 < report["difference"] < 1e-12


@pytest.mark.parametrize("mistake", CAUSES)
def test_the_cause_of_a_mistake_is_named(records, mistake):
    failed = None, Failure("exit code 1") if mistake == "rank 0 stops" else None
    report = verify.compare(of_one(records, mistake), records / f"{mistake} on 2", failed=failed)
    assert (report["verdict"], report["cause"]) == ("different", CAUSES[mistake]), report
    assert report["step"] == STEPS.get(mistake, 1)
    if mistake not in ("fewer epochs", "rank 0 stops"):
        assert re.search(r"\b[012]\.(weight|bias)$|seen|layer", report["parameter"])


@pytest.mark.parametrize("way", ["cut by hand", "weights of each rank"])
def test_ranks_that_differ_alike_in_two_runs_of_a_command_are_reproducible(records, way):
    assert verify.compare(records / f"{way} on 2", records / f"{way} on 2", again=True)["verdict"] == "same"


@pytest.mark.parametrize(("mistake", "said"), [
    ("other values", "the indices agree, so the same samples have different values"),
    ("order of one process", "B shuffles"),
    ("no sampler", "every rank reads the same samples"), ("equal rows by hand", "every rank reads the same samples")])
def test_the_answer_says_how_samples_differ(records, mistake, said):
    """The samples of a loop without a loader, such as the rows by hand, are the inputs of the model."""
    assert said in verify.compare(of_one(records, mistake), records / f"{mistake} on 2")["message"]


def test_draws_at_the_start_for_a_loader_and_of_integers_are_told_apart(records):
    for name, kinds in (("right", {"torch, before the first forward pass", "torch, integers"}),
                        ("lists", {"torch, before the first forward pass", "torch, loader"})):
        sites = Run.read(records / f"{name} on 1", "A").at(0)[0][0]["sites"]
        assert {re.fullmatch(r"mistakes\.py:\d+ \((.*)\)", label)[1] for label, *_ in sites} == kinds


def test_a_draw_is_named_and_a_slice_is_not_taken_for_an_output_that_differs(records):
    right, dropout, cut = (Run.read(records / way, way) for way in (
        "right on 1", "functional dropout on 2", "cut by hand on 2"))
    site, = draws_that_differ(right, dropout, 0)
    assert re.fullmatch(r"mistakes\.py:\d+ \(torch\)", site) and not draws_that_differ(right, cut, 0)
    assert not first_value(right, cut, 0)


def test_noise_that_each_rank_adds_to_gradients_by_hand_is_random(records):
    folders = [records / name for name in ("each sample on 1", "each sample, other noise on 2")]
    report = verify.compare(*folders)
    assert report["cause"] == "unknown" and "without backward(), no loss is known" in report["message"], report
    found = trace(report, *[Run.read(folder, label) for folder, label in zip(folders, "AB")])
    assert found["cause"] == "random" and re.search(r"differ: mistakes.py:\d+ \(torch\)$", found["message"]), found


@pytest.mark.parametrize(("mistake", "said"), [
    ("own mean", "divide by 36, 50 (mistakes.py:"),
    ("half of a batch", "the samples were not seen, so they may differ")])
def test_samples_that_are_joined_are_not_seen_and_their_numbers_are_not_compared(records, mistake, said):
    folders = [records / name for name in ("joined on 1", f"joined, {mistake} on 2")]
    report = trace(verify.compare(*folders), *map(Run.read, folders, "AB"))
    assert said in report["message"] and "integers" not in report["message"], report


def test_padded_outputs_of_other_lengths_are_not_said_to_agree(records):
    """Each rank pads the samples, which the loader delivers as a list, to its own longest one."""
    folders = [records / name for name in ("lists on 1", "lists, padding read on 2")]
    report = trace(verify.compare(*folders), *map(Run.read, folders, "AB"))
    assert report["cause"] == "loss" and "; both programs divide their losses by" in report["message"], report
    assert "the output of Padded has another size" in report["message"] and "agree" not in report["message"]


def test_the_answer_names_the_input_that_differs_and_the_draw(records):
    folders = [records / f"noise of each rank on {world}" for world in (1, 2)]
    report = trace(verify.compare(*folders), *map(Run.read, folders, "AB"))
    assert report["cause"] == "samples"
    assert "the input of Sequential differs: look before the model" in report["message"]
    assert re.search(r"random numbers that differ: mistakes\.py:\d+ \(torch\)", report["message"])


@pytest.mark.parametrize(("mistake", "said", "sure"), [
    ("mean over own tokens", "weighted by the counts", True), ("labels smoothed", "mean loss", False),
    ("average of one epoch", "the ranks of each run agree", True),
    ("gathered loss", "no gradient passes through all_gather in mistakes.py", True),
    ("flat, decayed", "only one run has the option(s) weight_decay 0, weight_decay 0.1", True),
    ("weight decay", "weight_decay is 0 in A and 0.1 in B for 1 of 4 parameters, such as 0.weight in group 0", True),
    ("gradients kept", "gradients of weights of SGD", True),
    ("owned by ranks, gradients kept", "gradients that SGD, which does not hold these weights, left", True)])
def test_the_answer_says_what_shows_it_or_that_it_is_not_sure(records, mistake, said, sure):
    message = verify.compare(of_one(records, mistake), records / f"{mistake} on 2")["message"]
    assert said in message and message.startswith("not sure: ") != sure


@pytest.mark.parametrize(("mistake", "start", "said"), [
    ("labels smoothed", "equal samples", "the outputs of all modules agree, so the loss differs"),
    ("weighted, own median", "the outputs of all modules agree", "(an operand of Mul 1, mistakes.py:"),
    ("weighted, own mean", "the outputs of all modules agree, but an operand of Pow 1, mistakes.py:", "own samples"),
    ("weighted, taught", "the input of Sequential, which computes without gradients, differs", "compare what this mod"),
    ("equal rows by hand", "every rank reads the same samples", "the input of Sequential differs")])
def test_the_values_of_the_step_say_more(records, mistake, start, said):
    folders = [of_one(records, mistake), records / f"{mistake} on 2"]
    message = trace(verify.compare(*folders), *map(Run.read, folders, "AB"))["message"]
    assert message.startswith(start) and said in message


@pytest.mark.parametrize(("mistake", "before", "after", "said"), [
    ("sharded, clipped per rank", "no-backward", "clip", "not sure: the gradients agree after the last"),
    ("two loaders, taken, half of it", "no-backward", "clip", "not sure: the gradients agree after the last"),
    ("sharded, half clipped", "clip", "scale", "after the last backward pass, the gradients of B are 0.5 times")])
def test_what_changes_gradients_by_hand_is_told_from_the_backward_pass(records, mistake, before, after, said):
    folders = [records / f"{mistake.partition(',')[0]} on 1", records / f"{mistake} on 2"]
    report = verify.compare(*folders)
    assert report["cause"] == before and report["message"].startswith("not sure: ")
    report = trace(report, *map(Run.read, folders, "AB"))
    assert report["cause"] == after and report["message"].startswith(said), report


@pytest.mark.parametrize(("kind", "cause"), [("torch", "random"), ("torch, loader", "clip")])
def test_noise_after_the_backward_pass_is_random(records, kind, cause):
    folders = [records / "sharded on 1", records / "sharded, clipped per rank on 2"]
    report, runs = verify.compare(*folders), [Run.read(folder, label) for folder, label in zip(folders, "AB")]
    for found, size in zip(runs, (1.0, 2.0)):
        for state in found.at(0)[0]:
            state["sites"] = [[f"a.py:7 ({kind})", 8, size, size]]
    found = trace(report, *runs)
    assert found["cause"] == cause and (f"numbers in this step, a.py:7 ({kind}): " in found["message"]) == (
        cause == "random"), found


@pytest.mark.parametrize(("after", "drawn", "cause", "said"), [
    ("zero", True, "random", "the ranks of B change their gradients after the last backward pass, and the program"),
    ("averaged", True, "random", "the ranks of B change their gradients after the last backward pass, and the program"),
    ("averaged", False, "clip", "not sure: the ranks of B have equal gradients after the last backward pass"),
    ("own", True, "random", "the ranks of B change their gradients after the last backward pass, and the program"),
    ("own, in the model", True, "not-averaged", "not sure: the ranks of B have different gradients after the last"),
    ("other stage", True, "not-averaged", "ranks 0 and 1 of B have different gradients: call the DDP wrapper"),
    ("own", False, "not-averaged", "not sure: the ranks of B have different gradients after the last backward pass"),
    ("scaled", True, "not-averaged", "ranks 0 and 1 of B have different gradients: call the DDP wrapper"),
    ("one averaged", True, "not-averaged", "ranks 0 and 1 of B have different gradients: call the DDP wrapper"),
    ("one lacking", True, "not-averaged", "ranks 0 and 1 of B have different gradients: call the DDP wrapper"),
    ("unknown", True, "not-averaged", "ranks 0 and 1 of B have different gradients: call the DDP wrapper")])
def test_what_each_rank_does_to_averaged_gradients_is_not_a_missing_average(records, after, drawn, cause, said):
    """Each rank adds its own noise to the gradients that DDP has averaged."""
    folders = [records / f"noise on gradients on {world}" for world in (1, 2)]
    report, runs = verify.compare(*folders), [Run.read(folder, label) for folder, label in zip(folders, "AB")]
    assert report["cause"] == "not-averaged", report
    states = runs[1].at(0)[0]
    for rank, row in ((rank, row) for rank, state in enumerate(states) for row in state["rows"]):
        if after == "zero" and row.name == "0.weight":  # such as a frozen row: it has nothing to compare
            row.grad[:] = row.computed[:] = [0.0] * 3
        if "own" in after:
            row.computed[:] = [value + rank for value in row.computed]
        if after == "scaled":
            row.computed[:] = [2.0 * value for value in row.grad]
    if after == "one averaged":
        states[1]["rows"][0].grad[:] = states[0]["rows"][0].grad
    if after == "one lacking":
        states[1]["rows"][0].grad[:] = [0.0] * 3
    if after == "unknown":
        states[1]["rows"][0] = states[1]["rows"][0]._replace(computed=None)
    if after == "other stage":
        states[1]["rows"].reverse()
    for state in (*runs[0].at(0)[0], *states):
        state["sites"] *= drawn
        if "in the model" in after:  # such as dropout
            state["sites"] = [["a.py:1, module 0 (torch)", *numbers] for _, *numbers in state["sites"]]
    found = trace(report, *runs)
    assert found["cause"] == cause and found["message"].startswith(said), found
    assert (found == report) == said.startswith("ranks 0 and 1"), found
    assert bool(re.search(r"in this step, mistakes\.py:\d+ \(torch\): ", found["message"])) == (cause == "random")


@pytest.mark.parametrize(("way", "known"), [("right", True), ("cut by hand", False)])
def test_gradients_after_the_backward_pass_are_compared_if_they_are_whole(records, way, known):
    runs = Run.read(of_one(records, way), "A"), Run.read(records / f"{way} on 2", "B")
    assert bool(after_backward(*runs, 0)) == known


def test_ranks_that_train_apart_are_not_comparable_with_one(records):
    report = verify.compare(records / "right on 1", records / "local SGD on 2")
    assert report["verdict"] == "not comparable" and "the ranks of B train apart for 3 step(s)" in report["message"]
    assert verify.compare(records / "local SGD on 2", records / "local SGD on 2")["verdict"] == "same"


@pytest.mark.drill
def test_the_last_step_has_the_parameters_of_all_optimizers(tmp_path):
    assert record(f"{PYTHON} {HERE / 'ending.py'} turns", tmp_path, 60, steps=2) is None
    recorded = Run.read(tmp_path, "A")
    assert recorded.length == 2 and len(recorded.at(1)[0][0]["rows"]) == 4 and "last" in recorded.kinds(0)


def test_padding_does_not_hide_that_ranks_read_the_same_samples(records, tmp_path):
    for path in (records / "equal rows by hand on 2").glob("*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for batch in (batch for event in events if event["event"] == "step" for batch in event["batches"]):
            ones = 0.25 * (path.name[0] == "1")
            batch[2:4] = [sample + 7 * ones for sample in batch[2]], [[7, 1, ones]]
        (tmp_path / path.name).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert watch(tmp_path)["cause"] == "samples"


def test_the_order_of_the_commands_does_not_matter(records):
    report = verify.compare(records / "no set_epoch on 2", records / "right on 1")
    assert (report["cause"], report["step"], report["ranks"]) == ("set-epoch", 7, [2, 1])


@pytest.mark.parametrize(("arguments", "names"), [
    ([], "COMMAND"), (["true"], "COMMAND"), (["true", "'"], "'"), (["", "true"], "empty"),
    (["--steps", "x", "true", "true"], "'x'"), (["--json", "nowhere/report.json", "true", "true"], "nowhere")])
def test_wrong_usage_is_named_in_one_line(arguments, names):
    said = run(PYTHON, "-m", "verify", *arguments)
    assert said.code == 2 and said.out == "" and len(said.err.splitlines()) == 1 and names in said.err


@pytest.mark.parametrize(("command", "said"), [
    ("true", "command A took no optimizer step"), ("sh -c 'echo broken pipe >&2; exit 3'", "broken pipe"),
    ("/no/such/program", "/no/such/program")])
def test_commands_that_train_nothing_are_not_comparable(command, said, tmp_path):
    result = run(PYTHON, "-m", "verify", "--json", tmp_path / "report.json", command, "true")
    assert result.code == 2 and "\nnot comparable: " in result.out and said in result.out
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "not comparable"


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    command = f"sh -c 'sleep 600 & echo $! > {tmp_path}/pid; setsid sleep 600'"
    said = verify.record(command, tmp_path / "run", 1.0)
    assert said.why.startswith("did not end within 1 s")
    stat = f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat"
    assert not os.path.exists(stat) or open(stat).read().split()[2] == "Z"


@pytest.mark.parametrize(("way", "said"), [("by-hand", "command A took no optimizer step"),
                                           ("nan", "both models contain NaN or infinity after step")])
def test_what_took_no_step_or_diverged_is_not_the_same(records, way, said):
    report = verify.compare(records / way, records / way)
    assert report["verdict"] == "not comparable" and said in report["message"]


def test_a_module_may_take_any_keyword(records):
    assert verify.compare(records / "well", records / "keywords")["verdict"] == "same"


def test_a_run_that_fails_does_not_differ(records, tmp_path):
    """verify reports its error, not the missing steps that follow from it."""
    failed = verify.record(f"{PYTHON} {HERE / 'ending.py'} error", tmp_path / "run", 60)
    assert "a picture is broken" in failed.said
    assert verify.compare(records / "well", tmp_path / "run", failed=(None, failed))["cause"] is None
    assert verify.compare(records / "well", tmp_path / "run")["cause"] == "batch-size"


def test_a_mistake_that_one_run_shows_is_found_without_another(records):
    found = {mistake: {finding["cause"] for finding in watch(records / f"{mistake} on 2")["findings"]}
             for mistake in WATCHED}
    assert found == {mistake: {*cause.split(", ")} if cause else set() for mistake, cause in WATCHED.items()}


def test_gradients_that_a_closure_computes_are_seen(records):
    report = watch(records / "closure")
    assert report["verdict"] == "sound" and report["steps"] == [6], report


def test_averages_of_a_sharded_model_are_known_to_be_sharded(records):
    assert "sharded" in Run.read(records / "sharded on 2", "B").flags - Run.read(records / "right on 2", "B").flags


def test_a_rank_that_reads_an_epoch_again_is_named(records):
    folders = [records / name for name in ("right on 1", "set_epoch on rank 0 on 2")]
    report = verify.compare(*folders)
    assert report["message"].startswith("rank 1 of B reads the same samples in steps 7 and 1: "), report
    assert verify.compare(*folders[::-1])["message"].startswith("rank 1 of A reads the same samples"), report


@pytest.mark.parametrize("way", ["repeats", "augmented", "no indices", "goes on otherwise", "few", "both",
                                 "no set_epoch"])
def test_a_rank_repeats_its_epoch_if_all_that_follows_is_equal(records, way):
    """One batch may be equal by chance, above all a small one."""
    runs = Run.read(records / "right on 2", "A"), Run.read(records / "set_epoch on rank 0 on 2", "B")
    steps = runs[1].ranks[1]
    if way == "augmented":
        steps[6]["samples"][0] += 1.0
    for step in steps if way == "no indices" else ():
        step["indices"] = []
    if way == "goes on otherwise":
        steps[7]["samples"][0] += 1.0
        steps[7]["indices"][0] += 1
    if way == "few":
        runs[1].length = 7
        for step in steps:
            del step["samples"][2:], step["indices"][2:]
    if way == "both":
        runs[0].ranks[1][:] = [{**step, "samples": [*step["samples"]]} for step in steps]
        runs[0].ranks[0][6]["samples"][0] += 1.0
        runs[0].ranks[0][6]["indices"][0] += 1
    for event in runs[1].events[1] if way == "no set_epoch" else ():
        event |= {"sampler": "RandomSampler"}
    found = set_epoch(Difference(*runs, 6, "grad", match(runs[0].at(6)[1], runs[1].at(6)[1])))
    assert found == ("rank 1 of B reads the same samples in steps 7 and 1" if way in (
        "repeats", "augmented", "no indices") else None)


def test_the_outputs_of_batchnorm_are_the_first_that_differ(records):
    folders = [records / f"batchnorm on {world}" for world in (1, 2)]
    report = trace(verify.compare(*folders), *map(Run.read, folders, "AB"))
    assert report["cause"] == "batchnorm" and "the output of 1 differs" in report["message"], report


def test_flat_shards_may_be_those_of_the_first_command(records):
    assert verify.compare(records / "flat on 2", records / "right on 1")["verdict"] == "same"
    assert verify.compare(records / "flat, decayed on 2", records / "right on 1")["cause"] == "optimizer"


@pytest.mark.parametrize(("size", "verdict", "low", "high"), [(1e-10, "same", 1e-11, 1e-9),
                                                              (1e-7, "different", 1e-9, 1e-6)])
def test_the_greatest_difference_of_all_steps_is_reported(records, tmp_path, size, verdict, low, high):
    path, = (records / "right on 1").glob("*.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    row = [event for event in events if event["event"] == "rows"][2]["rows"][0]
    row[1] = [value * (1 + size) for value in row[1]]  # its gradient
    (tmp_path / path.name).write_text("".join(json.dumps(event) + "\n" for event in events))
    report = verify.compare(records / "right on 1", tmp_path)
    assert report["verdict"] == verdict and low < report["difference"] < high


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "note"), [
    ("float32", "note: in float64, command B fails after 3 step(s)"),
    ("rounded", "note: in float64, the runs differ by")])
def test_runs_that_float64_does_not_suit_are_compared_in_their_own_precision(way, note):
    commands = (f"{PYTHON} {HERE / 'ending.py'} {each}" for each in ("well", way))
    said = run(PYTHON, "-m", "verify", *commands, env=FROM_ROOT)
    assert said.code == 0 and "\nsame: 6 steps" in said.out
    assert said.out.splitlines()[-1].startswith(note)


@pytest.mark.nightly
def test_complex_weights_are_compared_in_float64():
    said = run(PYTHON, "-m", "verify", *[f"{PYTHON} {HERE / 'ending.py'} complex"] * 2, env=FROM_ROOT)
    assert said.code == 0 and said.out.count("3 steps, float64 precision") == 2, said


def test_gradients_that_are_reset_between_the_steps_of_a_slower_optimizer_are_named(records):
    report = verify.compare(records / "turns", records / "turns-reset")
    assert (report["cause"], report["step"]) == ("reset", 2), report


def test_a_step_has_the_parameters_of_all_optimizers_that_follow_one_backward_pass(records):
    """The second optimizer follows every second backward pass; the first one later has a parameter more."""
    run = Run.read(records / "turns", "A")
    found = [(state["optimizer"], [row.shape for row in run.at(number)[0][0]["rows"]])
             for number, state in enumerate(run.ranks[0])]
    first, later, second = [[3, 3], [3]], [[3, 3], [3], [1]], [[1, 3], [1]]
    assert found == [(0, rows) for rows in [first, first + second] * 2 + [later, later + second] * 2]


def test_optimizers_with_backward_passes_of_their_own_have_steps_of_their_own(records):
    """Of the optimizers in turn, the second and the fourth only create their state."""
    passes = [[state["reached"] for state in Run.read(records / way, way).ranks[0][:2]] for way in (
        "turns", "turns-alone")]
    assert passes == [[[[0, 1]], [[0, 1]]], [[[0]], [[1]]]]
    run = Run.read(records / "turns-alone", "A")
    found = [(state["optimizer"], len(run.at(number)[0][0]["rows"])) for number, state in enumerate(run.ranks[0])]
    assert found == [(0, 2), (1, 2)] * 4


def test_complex_batches_and_ignored_labels_are_recorded(records):
    """In float64, a batch of complex64 would end the program. The criterion ignores two of four labels."""
    run = Run.read(records / "complex", "A")
    assert "torch.complex128" in run.flags and "torch.complex64" not in run.flags  # the weights
    assert run.kinds(0)[-1] == "end" and run.length == 3
    assert run.states(0)[0]["counts"][0][:8] == [4, 2, 4, 2.0, *[6.0] * 4]  # the weights of the labels, too
    assert [name for name, _ in run.states(0)[0]["weights"]] == ["weight of cross_entropy"]
    assert load(run.states(0)[0])["sites"][0][1] == 2 * 12 * 3  # both parts of each number drawn


def test_two_processes_that_are_both_rank_0_are_not_comparable(records, tmp_path):
    """Their steps must not be treated as steps of one rank."""
    for number in ("1", "2"):
        (tmp_path / f"0-{number}.jsonl").write_text(next((records / "right on 1").glob("*.jsonl")).read_text())
    report = verify.compare(records / "right on 1", tmp_path)
    assert report["verdict"] == "not comparable" and "command B restarted" in report["message"]


def test_points_whose_gradients_the_loss_needs_are_samples_but_not_what_a_stage_receives(records):
    one, two = (Run.read(records / f"rows by hand, points on {world}", "run") for world in (1, 2))
    assert len(one.samples(0)) == 8 and equal(one.samples(0), two.samples(0))
    steps = [{"event": "step", "batches": [[LEAVES, [], [1.0], [], []]], "flags": [], "table": [name]} for name in "ab"]
    run = Run("the run", [*enumerate([step] for step in steps)])
    assert not run.samples(0)


def test_what_a_backward_pass_computes_and_indices_that_are_numbers_are_recorded(records):
    state = Run.read(records / "penalty on 1", "A").states(1)[0]
    assert (state["graphs"], len(state["labels"])) == (1, 8)  # for each of two micro-batches of 4 samples
    assert described(0, [torch.ones(3, 2)], ["name", ("pair", 1), 7, numpy.int64(8)])[4] == [7, 8]


@pytest.mark.drill
def test_another_rate_is_named_as_the_cause(tmp_path):
    """The run ends after three steps; run() checks that no process is left."""
    commands = [f"python train.py {shlex.join(SAME)} --output-dir {tmp_path}/one",
                f"torchrun --nproc-per-node=2 train_DDP.py {shlex.join(SAME)} --lr 0.1 --output-dir {tmp_path}/two"]
    result = run(PYTHON, "-m", "verify", "--steps", "3", "--json", tmp_path / "report.json", *commands)
    assert result.code == 1, result.out + result.err
    assert result.out.splitlines()[:4] == [f"A: {commands[0]}", "   1 rank(s), 3 steps, float64 precision",
                                           f"B: {commands[1]}", "   2 rank(s), 3 steps, float64 precision"]
    assert "\ncause: learning-rate: " in result.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["verdict"], report["cause"], report["step"], report["ranks"]) == (
        "different", "learning-rate", 1, [1, 2])


@pytest.mark.drill
def test_every_missing_average_is_looked_at_again(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, torch, torch.distributed as dist\n"
                      "dist.init_process_group('gloo')\n"
                      "torch.manual_seed(0)\n"
                      "layer = torch.nn.Linear(2, 3)\n"
                      "optimizer = torch.optim.SGD(layer.parameters(), 0.1)\n"
                      "noise = torch.Generator().manual_seed(dist.get_rank())\n"
                      "layer(torch.arange(8.0).view(4, 2)[dist.get_rank()::dist.get_world_size()]).sum().backward()\n"
                      "for item in layer.parameters():\n"
                      "    item.grad += torch.randn(item.shape, generator=noise)\n"
                      "optimizer.step()\n")
    commands = [f"torchrun --standalone --nproc-per-node={count} {script}" for count in (2, 1)]
    said = run(PYTHON, "-m", "verify", *commands).out
    assert "\ncause: random: the ranks of A change their gradients after the last backward pass" in said, said


@pytest.mark.drill
def test_a_program_that_fails_only_while_its_values_are_recorded_is_noted(tmp_path):
    """Else, the answer would lack what that run shows, and nobody would know why."""
    script = tmp_path / "train.py"
    script.write_text("import sys, torch\n"
                      "if torch._C._len_torch_function_stack():\n"
                      "    raise TypeError('no modes')\n"
                      "torch.manual_seed(0)\n"
                      "layer = torch.nn.Linear(2, 3)\n"
                      "optimizer = torch.optim.SGD(layer.parameters(), 0.1)\n"
                      "loss = (layer(torch.ones(4, 2)) - 3).abs() ** float(sys.argv[1])\n"
                      "loss.mean().backward()\n"
                      "optimizer.step()\n"
                      "sys.exit('too late' if sys.argv[1] == '3' else 0)\n")
    result = run(PYTHON, "-m", "verify", f"python {script} 2", f"python {script} 3")
    assert "different: step 1" in result.out, result.out + result.err
    assert "note: command B failed: exit code 1\ntoo late" in result.out
    assert "note: the run that records this step's values failed: exit code 1" in result.out
    assert "TypeError: no modes" in result.out


LANGUAGE = ["--epochs", "1", "--batch-size", "12", "--windows", "26", "--length", "32", "--sample", "", "--device",
            "cpu", "--document-mask", "--workers", "0"]


def verify_meshes(scripts, folder, cwd=ROOT):
    """Return what verify says about two scripts for language models; the second has two processes."""
    commands = [[*command(script), *LANGUAGE, "--output-dir", folder / script] for script in scripts]
    return run(PYTHON, "-m", "verify", *[shlex.join(map(str, words)) for words in commands], cwd=cwd, env=FROM_ROOT).out


@pytest.mark.nightly
@pytest.mark.parametrize("scripts", [
    ("language/train.py", "language/train_CP.py"), ("language/train.py", "language/train_TP.py"),
    ("language/train.py", "language/train_4D.py"), ("language/train_CP.py", "language/train_TP.py")])
def test_meshes_of_a_language_model_train_the_same(tmp_path, scripts):
    said = verify_meshes(scripts, tmp_path)
    assert re.search(r"^same: 2 steps, greatest relative difference \S+e-1[3-6]$", said, re.M), said


@pytest.mark.nightly
@pytest.mark.parametrize(("file", "right", "wrong", "cause", "fact"), [
    ("language/train_CP.py", "            targets = model.part(targets)",
     "            targets = targets[:, :args.length // 2]", "loss", "so the loss differs"),
    ("language/gpt.py", "angles = positions[:, None]", "angles = every[:len(positions), None]", "forward",
     "the input of model differs"),
    ("language/train_CP.py", "        dist.reduce_scatter(part, parts, group=ctx.group)",
     "        part = parts[ctx.group.rank()]", "no-backward", "so the backward pass differs"),
    ("language/train_4D.py", "            stages.sum_tied(model, group)\n", "", "partial",
     "two copies of model.embed_tokens.weight in B"),
    ("language/train_CP.py", "criterion(parallel_model(inputs), targets)\n",
     "criterion(parallel_model(inputs), targets) / context_group.size()\n", "scale", "0.5 times")])
def test_a_wrong_line_of_a_mesh_is_named(tmp_path, file, right, wrong, cause, fact):
    script = file if "train" in file else "language/train_CP.py"
    copy_out(script, tmp_path / "copy")
    replace_lines(tmp_path / "copy" / file, {right: wrong})
    said = verify_meshes(("language/train.py", script), tmp_path, tmp_path / "copy")
    assert f"\ncause: {cause}: " in said and fact in said, said
