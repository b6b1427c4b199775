"""verify names the step, parameter and cause of a difference in records of small loops, forked from one process."""
import contextlib
import copy
import functools
import json
import math
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import FROM_ROOT, PYTHON, ROOT, SAME, command, copy_out, good, replace_lines, run

import verify
from verify.comparing import LIMITS, Failure, compare_runs, filled, float64_fails, printed_differ, unequal_steps
from verify.digests import digest, find_parts, marks
from verify.draws import Draws
from verify.explaining import CAUSES as KNOWN
from verify.explaining import (
    Difference,
    learning_rate,
    mixed,
    optimizer,
    options_that_differ,
    parts_of,
    set_epoch,
    stale,
    unchanged,
    unmatched,
)
from verify.modules import Modules, tensors_of
from verify.precision import widened
from verify.recording import (
    CRITERIA,
    MISSING,
    REACHED,
    UNREACHED,
    Recorder,
    digest_if_known,
    from_parameters,
    only_creates_state,
    options_of,
)
from verify.records import (
    FROZEN,
    INPUTS,
    LEAVES,
    MIXED,
    UNKNOWN,
    UNNAMED,
    Row,
    Run,
    Starts,
    equal,
    in_step,
    join_samples,
    load,
    match,
    steps_of,
)
from verify.running import own_error, record
from verify.samples import Samples, by_sample, counts_of, described, samples_of
from verify.tracing import after_backward, draws_that_differ, first_value, trace
from verify.watching import new_order, one_share, rates, replicas, watch

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
    "weighted, own median": "evaluation", "weighted, taught": "evaluation", "flat, decayed": "optimizer",
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


@pytest.mark.parametrize(("losses", "said"), [([1.0], True), ([], False)])
@pytest.mark.parametrize(("factor", "cause"), [(0.7123, "clip"), (0.5, "scale")])
def test_equal_losses_are_evidence_only_if_there_are_losses(losses, said, factor, cause):
    runs = [made(label, *[[("w", [2], [0.0] * 3, [size] * 3, [1.0] * 3)]] * ranks)
            for label, size, ranks in (("A", 1.0, 1), ("B", factor, 2))]
    for state in runs[0].states(0) + runs[1].states(0):
        state["losses"] = losses
    report = compare_runs(*runs)
    assert report["cause"] == cause and ("equal losses" in report["message"]) == said, report


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
    assert "equal samples" in report["message"]
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
    ("gradients kept", "gradients that SGD left", True),
    ("owned by ranks, gradients kept", "gradients that SGD, which does not hold these weights, left", True)])
def test_the_answer_says_what_shows_it_or_that_it_is_not_sure(records, mistake, said, sure):
    message = verify.compare(of_one(records, mistake), records / f"{mistake} on 2")["message"]
    assert said in message and message.startswith("not sure: ") != sure


@pytest.mark.parametrize(("mistake", "start", "said"), [
    ("labels smoothed", "equal samples", "the outputs of all modules agree, so the loss differs"),
    ("weighted, own median", "the outputs of all modules agree", "(an operand of Mul 1, mistakes.py:"),
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


@pytest.mark.parametrize(("own", "number", "said"), [
    (1, 4, "equal gradients, but not of 1 of 4 parameters, such as v0, so average these, too"),
    (2, 5, "equal gradients, but not of 2 of 5 parameters, such as v0, so average these, too"),
    (2, 4, "evidence"), (0, 3, "evidence")])
def test_averaged_gradients_that_each_rank_clips_by_its_own_norm_are_known(own, number, said):
    """A tensor that is not averaged enters the norm, so that those of all tensors differ. Two may do so by chance."""
    ranks = [[(f"v{n}", [2], [1.0 + n] * 3,
               [by * (n + 2 + rank * (n < own // 2)), by * (1 + rank * (n < own)), by], [1.0] * 3)
              for n in range(number)] for rank, by in enumerate((1.0, 0.7))]
    a, b = made("A", ranks[0]), made("B", *ranks)
    report = {"step": 1, "cause": "not-averaged", "message": "evidence"}
    assert said in trace(report, a, b)["message"]
    for rank, state in enumerate(b.states(0)):
        for row in state["rows"][:own]:
            row[2] = [1.0 + rank] * 3  # other slices of a tensor need no average
    slices = [[[*row[:3], *row[4:]] for row in state["rows"]] for state in b.states(0)]
    assert trace(report, a, made("B", *slices)) == report


@pytest.mark.parametrize(("losses", "part"), [
    ([], "loss, or what the program makes of its gradients,"), ([1.0], "backward pass")])
def test_without_a_loss_the_gradients_may_differ_for_any_reason(losses, part):
    state = {"losses": losses, "passed": [["output", "Net", True, 4, 8, 1.0, 1.0]]}
    runs = differing(state, state)
    found = trace({**compare_runs(*runs), "cause": "unknown"}, *runs)
    assert f"the outputs of all modules agree, so the {part} differs" in found["message"], found


@pytest.mark.parametrize(("way", "known"), [("right", True), ("cut by hand", False)])
def test_gradients_after_the_backward_pass_are_compared_if_they_are_whole(records, way, known):
    runs = Run.read(of_one(records, way), "A"), Run.read(records / f"{way} on 2", "B")
    assert bool(after_backward(*runs, 0)) == known


@pytest.mark.parametrize(("before", "factor", "first", "cause", "said"), [
    ("unknown", 1.0, [1, 1, 1], "clip", "not sure: the gradients agree after the last backward pass"),
    ("unknown", 0.5, [1, 1, 1], "clip", "not sure: the gradients agree after the last backward pass"),
    ("unknown", 0.7, [1, 1, 1], "scale", "after the last backward pass, the gradients of B are 0.7 times"),
    ("unknown", 1.0, [2, 2, 2], "group-scale", "after the last backward pass, 1 of 2 gradients of B are "),
    ("unknown", 0.7123, [1, 1, 1], "clip", "not sure: after the last backward pass, the gradients of B are 0.71"),
    ("unknown", 1.0, [0, 0, 0], "no-gradient", "after the last backward pass, 1 parameter(s) get no gradient in A"),
    ("unknown", 1.0, [2, 1, 3], "unknown", "evidence"),
    ("clip", 1.0, [2, 1, 3], "no-backward", "not sure: after the last backward pass, equal mean losses")])
def test_gradients_that_are_averaged_by_hand_are_compared_as_means_or_sums(before, factor, first, cause, said):
    """The ranks' gradients after the backward pass have the mean 1 or, as parts of a sum, the mean 0.5."""
    a, b = differing({}, {}, {})
    digests = [1.0, 1.0, 2.0], [9.0, 0.5 * factor, 3.0 * factor], [7.0, 1.5 * factor, factor]
    for state, computed in zip(a.states(0) + b.states(0), digests):
        state["rows"] = [[*row, None, 2, {}, computed] for row in state["rows"]]
    a.states(0)[0]["rows"][0][-1] = [x * y for x, y in zip(first, digests[0])]
    report = trace({"step": 1, "cause": before, "message": "evidence"}, a, b)
    assert report["cause"] == cause and report["message"].startswith(said), report


@pytest.mark.parametrize(("grad", "copy", "cause", "said"), [
    ([1, 0.6, 1.0], [1, 0.2, 0.2], "partial", "; if they should be one"),
    ([1, 0.6, 1.1], [1, 0.2, 0.2], "not-averaged", "; if they should be one"),
    ([1, 0.6, 1.1], [0.5, 0.05, 0.15], "clip", ", proportional to each other")])
def test_two_copies_of_a_weight_have_parts_of_its_gradient_up_to_clipping(grad, copy, cause, said):
    rows = [Row(name, [4], [3, 1, 2], [0.1], found, [1, 1, 1]) for name, found in (
        ("w", grad), ("w", [1, 0.1, 0.3]), ("copy", copy))]
    found = unmatched(rows[:1], rows[1:], [(rows[0], rows[1])])
    assert found[0] == cause and f"two copies of copy in B have different gradients{said}" in found[1]


@pytest.mark.parametrize(("shares", "cause"), [([[1.0], [2.0]], "not-averaged"), ([[1.0, 2.0]] * 2, "partial")])
def test_parts_of_a_gradient_are_not_averaged_if_the_ranks_have_other_samples(shares, cause):
    v, w = (lambda *grad, name=name: (name, [2], [1.0] * 3, [*grad], [1.0] * 3) for name in "vw")
    b = made("B", *[[v(*grad), w(2.0, 2.0, 2.0)] for grad in ((1.2, 1.0, 1.0), (1.5, 2.0, 3.0))])
    for state, share in zip(b.states(0), shares):
        state["batches"] = [[0, [], share, [], []]]
        join_samples(state)
    report = compare_runs(made("A", [v(2.0, 3.0, 4.0), w(2.0, 2.0, 2.0)]), b)
    assert report["cause"] == cause and "of 1 of 2 tensors, such as v" in report["message"], report
    assert ("whose sum over the ranks is that of A: add these up" in report["message"]) == (cause == "not-averaged")


@pytest.mark.parametrize(("ours", "theirs", "named"), [
    ([[1], [0]], [[1], [0, 1]], True), ([[], [0]], [[0], [0]], False), ([[0]], [[0, 1], [0]], False)])
def test_a_backward_pass_that_reaches_parameters_of_another_optimizer_is_named(ours, theirs, named):
    """FSDP2 reduces gradients in the last pass only, so that the others reach none."""
    report = compare_runs(*differing({"reached": ours}, {"reached": theirs}))
    assert (report["cause"] == "stale") == ("backward pass 2 " in report["message"]) == named, report


@pytest.mark.parametrize(("labels", "cause"), [(([16, 15, 9, 1], [16, 14, 9, 1]), "loss"),
                                               (([16, 15, 9, 1], [32, 28, 9, 1]), "uneven-mean"),
                                               (([16, 15, 9, 1], [16, 15, 9, 2]), "uneven-mean")])
def test_labels_that_one_run_ignores_are_counted(labels, cause):
    parts = [[labels[1][0] // 2, labels[1][1] // 2 + one, 4, 1] for one in (1, -1 + labels[1][1] % 2)]
    a, b = differing({"losses": [3.0], "counts": [labels[0]]}, *[
        {"losses": [loss], "counts": [part], "batches": [[0, [], [sample], [], []]]}
        for loss, part, sample in zip((2.0, 5.0), parts, (1.0, 2.0))])
    report = compare_runs(a, b)
    assert report["cause"] == cause and ("are not ignored in A" in report["message"]) == (cause == "loss"), report


@pytest.mark.parametrize(("losses", "cause"), [
    ([3.0, 3.0], "no-backward"), ([4.0, 4.0], "loss"), ([2.5, 3.5], "no-backward")])
def test_passes_that_only_pass_cached_gradients_back_have_no_losses(losses, cause):
    """As in GradCache: each rank's first backward pass has the whole loss, or that of its rows."""
    a, b = differing({"losses": [3.0]}, *[
        {"losses": [loss, 9.0], "batches": [[0, [], [sample], [], []]]} for loss, sample in zip(losses, (1.0, 2.0))])
    for state in a.states(0) + b.states(0):
        state["passed"] = [["output", "Net", True, 4, 8, 1.0, 1.0]]
    report = trace(compare_runs(a, b), a, b)
    assert report["cause"] == cause and report["message"].startswith("not sure: "), report


@pytest.mark.parametrize(("divisors", "cause"), [
    ((3.0, 4.0), "uneven-mean"), ((3.5, 3.5), "loss"), ((3.0, 5.0), "loss")])
def test_a_divisor_of_each_rank_is_named_with_its_line(divisors, cause):
    a, b = differing({"losses": [3.0], "divisors": [["() 1", [7.0], "a.py:2"]]}, *[
        {"losses": [5.0], "divisors": [["() 1", [divisor], "b.py:3"]]} for divisor in divisors])
    for state in a.states(0) + b.states(0):
        state["passed"] = [["output", "Net", True, 4, 8, 1.0, 1.0]]
    report = trace({"step": 1, "cause": "loss", "message": "not sure: evidence"}, a, b)
    assert report["cause"] == cause, report
    assert ("divide by 3, 4 (b.py:3), and A by 7" in report["message"]) == (cause == "uneven-mean"), report


@pytest.mark.parametrize(("number", "divisors", "size", "cause"), [
    (4, [[3.0] * 2, [4.0] * 3], 8, "uneven-mean"), (4, [[3.0] * 2, [4.0] * 3], 12, "uneven-mean"),
    (4, [[3.0] * 2, [4.5] * 3], 8, "loss"), (4, [[2.0, 1.0], [4.0] * 3], 8, "uneven-mean"),
    (2, [[3.0] * 2, [4.0] * 2], 8, "uneven-mean"),
    (1, [[2.0] * 2, [1.0, 2.0]], 8, "uneven-mean"),  # two micro-batches of equal counts
    (4, [[6.0] * 2, [8.0] * 3], 8, "uneven-mean"), (4, [[9.0] * 2, [12.0] * 3], 8, "loss")])  # twice as much: two ranks
def test_a_divisor_of_all_micro_batches_of_a_rank_counts_once(number, divisors, size, cause):
    """The padded outputs may have another size, as a rank's micro-batches are not those of one process."""
    a, b = differing({"losses": [1.0] * number, "divisors": [["() 1", [7.0], "a.py:2"]] * number}, *[
        {"losses": [2.0] * len(found), "divisors": [["() 1", [by], "b.py:3"] for by in found]} for found in divisors])
    for side, each in ((a, 8), (b, size)):
        for state in side.states(0):
            state["passed"] = [["output", "Net", True, 4, each, 1.0, 1.0]]
    report = trace({"step": 1, "cause": "loss", "message": "not sure: evidence"}, a, b)
    assert (report["cause"], "(b.py:3), and A by 7" in report["message"]) == (cause, cause == "uneven-mean"), report
    assert ("outputs of all modules agree" in report["message"]) == (size == 8), report
    assert ("divide by 3, 4 (" in report["message"]) == (cause == "uneven-mean" and divisors[0] == [3.0] * 2), report


def test_divisors_that_the_ranks_of_both_runs_have_differ_rightly():
    states = [{"losses": [loss], "divisors": [["() 1", [divisor], "a.py:2"]]}
              for loss, divisor in ((3.0, 3.0), (5.0, 4.0))]
    runs = [made(label, *[[("w", [3], [1.0] * 3, [size] * 3, [1.0] * 3)]] * 2)
            for label, size in (("A", 1.0), ("B", 2.0))]
    for state, change in zip(runs[0].states(0) + runs[1].states(0), states * 2):
        state |= change | {"passed": [["output", "Net", True, 4, 8, 1.0, 1.0]]}
    report = {"step": 1, "cause": "loss", "message": "not sure: evidence"}
    assert trace(report, *runs)["cause"] == "loss"


@pytest.mark.parametrize(("second", "cause"), [([4.0, -2.0], "uneven-mean"), ([4.0, -3.0], "loss")])
def test_a_vector_that_divides_such_as_the_sizes_in_a_dice_loss_is_compared_as_a_sum(second, cause):
    a, b = differing({"losses": [3.0], "divisors": [["(3,) 1", [7.0, 1.0], "a.py:2"]]}, *[
        {"losses": [5.0], "divisors": [["(3,) 1", sums, "b.py:3"]]} for sums in ([3.0, 3.0], second)])
    for state in a.states(0) + b.states(0):
        state["passed"] = [["output", "Net", True, 4, 8, 1.0, 1.0]]
    report = trace({"step": 1, "cause": "loss", "message": "not sure: evidence"}, a, b)
    said = "divide by vectors whose sums are 3, 4 (b.py:3), and A by vectors whose sums are 7" in report["message"]
    assert (report["cause"], said) == (cause, cause == "uneven-mean"), report


def test_a_list_of_tensors_is_one_input_per_tensor_or_one_sample():
    a, b, long = torch.ones(2, 3), torch.zeros(2), torch.ones(5)
    assert [id(part) for part in by_sample([a, b], 2)] == [id(a), id(b)]
    assert by_sample(([a, a], b), 2) == []  # two inputs of two samples, or a tensor for each sample?
    ragged, targets = by_sample(([a, long], b), 2)
    assert [id(part) for part in ragged] == [id(a), id(long)] and targets is b
    assert by_sample([torch.ones(8), torch.ones(8)], 4) == []  # rows of all samples


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_each_sample_has_is_no_part_of_the_batch():
    """With as many boxes as the batch has samples, an image's boxes are no row for each sample."""
    images = [torch.ones(3, 8, 8), torch.ones(3, 9, 9)]
    targets = [{"boxes": torch.ones(n, 4), "labels": torch.ones(n), "name": "cat"} for n in (2, 1)]
    for batch in ((images, targets), {"images": images, "targets": targets}):
        found = by_sample(batch, 2)
        assert found == [images, targets] and samples_of(found)[2] == 3 * 64 + 10
        assert [row[0] for row in counts_of(found)] == [6, 3, 3]  # channels, boxes and labels
    for batch in ([*zip(images, targets)], [{"image": image, **target} for image, target in zip(images, targets)]):
        found = by_sample(batch, 2)
        assert found == [batch] and samples_of(found)[2] == 3 * 64 + 10
        assert [row[0] for row in counts_of(found)] == [6, 3, 3]
    assert by_sample([{"view": torch.ones(2, 3)}, {"view": torch.ones(2, 3)}], 2) == []  # two parts of two samples?
    assert [len(part) for part in by_sample((images, [torch.ones(5), torch.ones(7)]), 2)] == [2, 2]
    assert [len(part) for part in by_sample((images, [[torch.ones(4)] * 3, [torch.ones(4)]]), 2)] == [2, 2]
    assert not by_sample([("text", torch.tensor(1)), ("other", torch.tensor(1))], 2)  # the text is not recorded
    assert not by_sample([{"ids": [1, 2]}, {"ids": [3, 4]}], 2)
    sparse = [torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])]
    assert by_sample((sparse[0], images, sparse[:1] * 2, sparse[1:] * 2), 2) == [images]
    (rows,) = by_sample([{"adjacency": sparse, "x": torch.ones(5)}] * 2, 2)
    assert samples_of([rows])[2] == 5
    found = by_sample((images, [{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(3)}]), 2)
    assert len(samples_of(found)[0]) == 2 and [row[0] for row in counts_of(found)] == [6]
    before = samples_of([targets])[0]
    targets[1]["labels"] *= 2
    assert [one == two for one, two in zip(before, samples_of([targets])[0])] == [True, False]


def test_ranks_that_train_apart_are_not_comparable_with_one(records):
    report = verify.compare(records / "right on 1", records / "local SGD on 2")
    assert report["verdict"] == "not comparable" and "the ranks of B train apart for 3 step(s)" in report["message"]
    assert verify.compare(records / "local SGD on 2", records / "local SGD on 2")["verdict"] == "same"


def test_a_schedule_that_runs_twice_as_fast_is_named():
    runs = [Run(label, [(0, [{"event": "step", "flags": [], "batches": [], "size": 0, "losses": [1.0], "clips": [],
                              "rows": [["w", [2], [1.0] * 3, [rate], [1.0] * 3, [1.0] * 3]]} for rate in rates])])
            for label, rates in (("A", [6e-5, 5e-5, 4e-5, 3e-5, 2e-5, 1e-5]), ("B", [6e-5, 4e-5, 2e-5, 0, 0, 0]))]
    pairs = list(zip(*[run.at(1)[1] for run in runs]))
    said = learning_rate(Difference(*runs, 1, "rate", pairs))
    assert said.startswith("the rate of all parameters is 5e-05 in A")
    assert "the schedule of B runs 2 times as fast" in said


def test_the_rank_whose_rates_differ_is_named():
    """Each rank is a stage of a pipeline."""
    a, b = made("A", [("w", [2]), ("v", [3])]), made("B", [("w", [2])], [("v", [3])])
    b.states(0)[1]["rows"][0][3] = [0.2]
    said = compare_runs(a, b)["message"]
    assert said.startswith("the rate of 1 of 2 parameters, such as v, all on rank(s) 1 of B, is 0.1 in A and 0.2 in B")


@pytest.mark.parametrize(("before", "cause"), [(0.1, "rank-lr"), (0.4, "learning-rate")])
def test_a_stage_whose_rate_does_not_change_is_named(before, cause):
    """The norms of both stages start equal. `before` is the rate of the second stage in the first step."""
    stages = [[("w", [2], [size] * 3, [1.0] * 3, [size] * 3), ("norm", [3], [1.0] * 3, [1.0, size, 1.0], [1.0] * 3)]
              for size in (1.0, 2.0)]
    runs = made("A", stages[0] + stages[1]), made("B", *stages)
    for each, later in zip(runs, ([0.05, before / 2], [0.1, before / 2])):
        for number, (rank, (state,)) in enumerate([*each.ranks.items()]):
            steps = []
            for left, right in ((0.1, before), later):
                rows = [[*row[:3], [right if number or place > 1 else left], *row[4:]]
                        for place, row in enumerate(state["rows"])]
                steps.append({**state, "rows": rows})
            each.ranks[rank] = steps
        each.length = 2
    report = compare_runs(*runs)
    assert (report["cause"], report["step"]) == (cause, 2), report
    assert "all on rank(s) 0 of B, is 0.05 in A and 0.1 in B" in report["message"]
    assert ("; the ranks of B had equal rates before: " in report["message"]) == (cause == "rank-lr")


def test_a_schedule_that_has_not_changed_yet_has_no_pace():
    runs = [Run(label, [(0, [{"event": "step", "flags": [], "batches": [], "size": 0, "losses": [1.0], "clips": [],
                              "rows": [["w", [2], [1.0] * 3, [rate], [1.0] * 3, [1.0] * 3]]} for rate in rates])])
            for label, rates in (("A", [0.3] * 4 + [0.2, 0.1]), ("B", [0.3] * 6))]
    said = learning_rate(Difference(*runs, 4, "rate", [*zip(*[run.at(4)[1] for run in runs])]))
    assert "in A and 0.3 in B" in said and "fast" not in said


@pytest.mark.parametrize(("noise", "verdict"), [(1e-17, "same"), (1e-9, "different")])
def test_the_error_of_a_gradient_that_is_zero_moves_nothing(noise, verdict):
    """Adam makes a whole update of it, as of the bias of attention's keys; nor does its average count."""
    runs = []
    for label, size in (("A", 1.0), ("B", 3.0)):
        runs.append(made(label, [("w", [2], [1.0] * 3, [1.0] * 3, [2.0] * 3),
                                 ("bias", [2], [0.0] * 3, [noise] * 3, [size * 1e-7] * 3)]))
        runs[-1].states(0)[0]["unoptimized"] = [["average of bias", [2], [size * 1e-7] * 3]]
    assert compare_runs(*runs)["verdict"] == verdict


@pytest.mark.parametrize(("clip", "said"), [
    (1.0, "the others are equal: "), (0.5, "the others are equal, up to a common factor 0.5, as of a clip")])
def test_a_group_of_gradients_with_another_factor_is_named(clip, said):
    """The gradient that is noise counts for nothing."""
    sizes = [("w", 1.0, 1.0), ("v", 2.0, 2.0), ("bias", 1.0, 3.0), ("noise", 1e-12, 9e-12)]
    runs = [made(label, *[[(name, [2], [0.0] * 3, [row[which] * (clip if which else 1)] * 3, [1.0] * 3)
                           for name, *row in sizes]] * (1 + which)) for which, label in enumerate("AB")]
    report = compare_runs(*runs)
    assert report["cause"] == "group-scale" and said in report["message"], report
    assert report["message"].startswith("1 of 4 gradients of B are 3 times those of A, such as that of bias")


@pytest.mark.parametrize(("reach", "value", "cause", "said"), [
    ((0, 2), 1.0, "no-gradient", "grad is None in A and zero in B for 1 of 2 parameters, such as head: the optimizer"),
    ((2, 0), 1.0, "no-gradient", "grad is None in B and zero in A for 1 of 2 parameters, such as head: the optimizer"),
    ((0, 0), 1.0, "optimizer", "equal gradients, but"), ((2, 2), 1.0, "optimizer", "equal gradients, but"),
    ((0, 2), 2.0, "optimizer", "equal gradients, but")])
def test_a_gradient_of_zero_in_place_of_none_is_named(reach, value, cause, said):
    """AdamW decays the weight in one run only, by little."""
    rows = [[("trunk", [2], [1.0] * 3, [1.0] * 3, [1.0 if which else value] * 3),
             ("head", [2], [1.0] * 3, [0.0] * 3, [1.0 - 1e-8 * which] * 3)] for which in range(2)]
    runs = [made(label, *[found] * (1 + which)) for which, (label, found) in enumerate(zip("AB", rows))]
    for found, reached in zip(runs, reach):
        for state in found.states(0):
            state["rows"] = [[*row, None, reached if row[0] == "head" else 2, {}] for row in state["rows"]]
    report = compare_runs(*runs)
    assert report["cause"] == cause and report["message"].startswith(said), report


@pytest.mark.parametrize(("norms", "cause", "said"), [
    ((1.28, 0.64), "scale", "the gradients of B are 0.5 times those of A, after equal losses: a sum is divided twice"),
    ((1.28, 0.9), "clip", "the gradients of B are 0.64 times those of A, after equal losses"),
    ((1.28, 1.28), "clip", "the gradients of B are 0.64 times those of A, after equal losses")])
def test_a_factor_is_that_of_the_norms_before_clipping(norms, cause, said):
    """A clips 1.28 to 1, so the clipped gradients have another factor than the unclipped ones."""
    runs = [made(label, *[[("v", [2], [1.0] * 3, [factor] * 3, [1.0] * 3), (
        "w", [3], [1.0] * 3, [2.0 * factor] * 3, [1.0] * 3)]] * ranks) for label, ranks, factor in (
        ("A", 1, 1.0), ("B", 2, 0.64))]
    for found, norm in zip(runs, norms):
        for state in found.states(0):
            state["clips"] = [[norm, 1.0]]
    for sample, state in enumerate(runs[1].states(0)):
        state |= batch(1.0 + sample)
        join_samples(state)
    report = compare_runs(*runs)
    assert report["cause"] == cause and report["message"].startswith(said), report


def test_an_answer_says_which_gradients_agree():
    said = compare_runs(*differing({}, batch(1.0), batch(2.0)))["message"]
    assert "but different gradients; 1 of 2 differ, such as that of v, but not that of w; or a term of the loss" in said


@pytest.mark.parametrize(("targets", "loader", "cause"), [
    ((4, 1, 3), INPUTS, "uneven-mean"), ((4, 4, 4), INPUTS, "batch-size"), ((0, 0, 0), INPUTS, "batch-size"),
    ((4, 1, 3), 0, "batch-size")])
def test_rows_of_a_models_inputs_are_no_samples_if_the_losses_have_as_many_targets(targets, loader, cause):
    """As the nodes of a sampled graph, of which the batches of two ranks share some. The classes have weights."""
    states = [batch(*map(float, range(rows)), loader=loader) | {"losses": [loss], "counts": [
                  [size] * 4 + [1.5 * size + loss] * 4] * (size > 0)}
              for rows, size, loss in zip((5, 4, 4), targets, (1.5, 1.0, 2.2))]
    report = compare_runs(*differing(*states))
    assert report["cause"] == cause, report


@pytest.mark.parametrize(("kinds", "said", "found"), [
    (("end", "failed"), "Connection closed by peer", "after 1 steps, rank(s) [0] of B end, and rank(s) [1] fail"),
    (("end", "failed"), "ValueError: a picture is broken", None),
    (("failed", "failed"), "Connection reset by peer", None)])
def test_a_rank_that_waits_for_one_that_has_ended_is_named(kinds, said, found):
    run = made("B", [("w", [2])], [("w", [2])])
    for events, kind in zip(run.events.values(), kinds):
        events.append({"event": kind})
    fact = unequal_steps(run, Failure("exit code 1", said))
    assert fact.startswith(f"not sure: {found}") and fact.endswith(said) if found else fact is None


@pytest.mark.parametrize("numbers", [(0, 2), (0, 1)])
def test_parts_of_a_tensor_may_have_an_optimizer_of_their_own(numbers):
    """It follows a backward pass of its own, as in a GAN, or joins the other one in the second step."""
    first = made("the run", *[[("w", [2], [1.0] * 3, [1.0] * 3, [2.0] * 3)]] * 2)
    second = made("the run", *[[("table", [4], [size] * 3, [size] * 3, [size] * 3),
                                ("norm", [3], [1.0] * 3, [1.0] * 3, [2.0] * 3)] for size in (1.0, 2.0)])
    for rank in first.ranks:
        one, two = first.ranks[rank][0], second.ranks[rank][0]
        steps = ({**one, "optimizer": 0}, {**one, "optimizer": 0, "rows": one["rows"] + two["rows"]},
                 {**two, "optimizer": 1})
        first.ranks[rank] = [steps[number] for number in numbers]
    first.length = 2
    assert replicas(first, LIMITS["own"]) is None


@pytest.mark.drill
def test_the_last_step_has_the_parameters_of_all_optimizers(tmp_path):
    assert record(f"{PYTHON} {HERE / 'ending.py'} turns", tmp_path, 60, steps=2) is None
    recorded = Run.read(tmp_path, "A")
    assert recorded.length == 2 and len(recorded.at(1)[0][0]["rows"]) == 4 and "last" in recorded.kinds(0)


def test_an_option_of_another_group_is_named_with_its_parameter():
    """Both optimizers print the same groups."""
    pairs = [tuple(Row(name, [2], [1.0] * 3, [rate], [1.0] * 3, [1.0] * 3, options={
        "optimizer": "SGD", "group": group, "momentum": "0.9", "weight_decay": decay}) for rate, group, decay in found)
             for name, *found in (("w", (0.1, "decay", "0.1"), (0.2, "rest", "0.0")),
                                  ("b", (0.1, "rest", "0.0"), (0.1, "rest", "0.0")))]
    it = SimpleNamespace(a=SimpleNamespace(label="A"), b=SimpleNamespace(label="B"), column="value", pairs=pairs,
                         flat=False)
    assert optimizer(it) == ("equal gradients, but different updates: weight_decay is 0.1 in A and 0.0 in B for 1 of 2 "
                             "parameters, such as w in group decay")
    pairs = [(one, two._replace(options={"optimizer": "Adam"})) for one, two in pairs]
    assert options_that_differ(pairs, "A", "B") == "optimizer is SGD in A and Adam in B for all parameters"


@pytest.mark.parametrize("pad", [0, -100, -1, 255, 50256, 0.5])
def test_padding_to_the_longest_sample_adds_nothing(pad):
    """Each rank pads to its own longest sample, along two axes; the sample of rank 1 is not padded."""
    data = [torch.arange(3, 3 + 2 * length).reshape(2, length)[:1 + length % 2] + torch.tensor(0 * pad)
            for length in (2, 9, 5, 8, 6, 7)]

    def of(label, *shares):
        found = made(label, *[[("w", [2], [1.0] * 3, [1.0] * 3, [1.0] * 3)]] * len(shares))
        for state, share in zip(found.states(0), shares):
            longest = [max(data[number].shape[axis] for number in share) for axis in (0, 1)]
            padded = [torch.nn.functional.pad(data[number], (0, longest[1] - data[number].shape[1],
                                                             0, longest[0] - data[number].shape[0]), value=pad)
                      for number in share]
            state["batches"] = [described(0, [torch.stack(padded), torch.tensor(share)])[:5]]
        return found

    a = of("A", range(6))
    for shares in ([0, 3, 5], [1], [2, 4]), [[number] for number in range(6)]:
        b = of("B", *shares)
        assert compare_runs(a, b)["verdict"] == "same" and equal(a.samples(0), b.samples(0))
    b = of("B", [0, 3, 5], [1], [2, 5])
    assert compare_runs(a, b)["verdict"] == "same" and not equal(a.samples(0), b.samples(0))


def test_padding_does_not_hide_that_ranks_read_the_same_samples(records, tmp_path):
    for path in (records / "equal rows by hand on 2").glob("*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for batch in (batch for event in events if event["event"] == "step" for batch in event["batches"]):
            ones = 0.25 * (path.name[0] == "1")
            batch[2:4] = [sample + 7 * ones for sample in batch[2]], [[7, 1, ones]]
        (tmp_path / path.name).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert watch(tmp_path)["cause"] == "samples"


@pytest.mark.parametrize(("other", "passed", "cause", "named"), [
    (1.0, 1.0, "loss", []), (1.0, 5.0, "samples", ["integers"]), (2.0, 1.0, "samples", ["loader", "integers"])])
def test_draws_that_change_nothing_are_innocent(other, passed, cause, named):
    """Such as a shuffle of each rank's own share; not time steps, which are an input of the model, nor noise."""
    runs = [made(label, [("w", [2], [1.0] * 3, [size] * 3, [1.0] * 3)]) for label, size in (("A", 1.0), ("B", 7.0))]
    for one, draw, sample, size in zip(runs, (3.0, 4.0), (1.0, other), (1.0, passed)):
        state, = one.states(0)
        kinds = ["torch, loader", "torch, integers"] + ["torch"] * (size > 1)
        state |= {"samples": [sample, 2.0], "sites": [[f"{kind} ({kind})", 8, draw, draw] for kind in kinds],
                  "passed": [["input", "Net", True, 4, 8, size, size]]}
    report = {"step": 1, "cause": "loss", "message": "evidence"}
    found = trace(report, *runs)
    assert (found["cause"], [word for word in ("loader", "integers") if word in found["message"]]) == (cause, named)


@pytest.mark.parametrize(("last", "named"), [(2.0, []), (5.0, ["a.py:1 (torch)"])])
def test_draws_before_and_after_the_first_forward_pass_are_of_one_line(last, named):
    """As of a population of models, of which each rank evaluates a share: each rank draws before its first model."""
    sites = [[["a.py:1 (torch, before the first forward pass)", 1, 1.0, 1.0],
              *[["a.py:1 (torch)", 1, value, value] for value in (3.0, 4.0, 2.0)]],
             *[[["a.py:1 (torch, before the first forward pass)", 1, early, early],
                ["a.py:1 (torch)", 1, late, late]] for early, late in ((1.0, 3.0), (4.0, last))]]
    a, b = differing(*({"sites": each} for each in sites))
    assert draws_that_differ(a, b, 0) == named


def test_a_line_that_only_draws_before_the_first_forward_pass_is_said_to_do_so():
    place = "a.py:1 (torch, before the first forward pass)"
    assert draws_that_differ(*differing(*({"sites": [[place, 1, x, x]]} for x in (1.0, 2.0))), 0) == [place]


@pytest.mark.parametrize(("kind", "sample", "cause"), [
    ("output", 1.0, "random"), ("input", 1.0, "samples"), ("output", 2.0, "samples")])
def test_draws_that_no_input_shows_are_noise(kind, sample, cause):
    """Such as noise on the weights, which a model has from torch.func.functional_call."""
    states = [batch(value) | {"passed": [[kind, "Net", True, 4, 8, size, size]],
                              "sites": [["a.py:1 (torch)", 4, size, size]]}
              for value, size in ((1.0, 1.0), (sample, 5.0))]
    found = trace({"step": 1, "cause": "unknown", "message": "evidence"}, *differing(*states))
    assert found["cause"] == cause and "a.py:1 (torch)" in found["message"], found


@pytest.mark.parametrize(("cause", "named"), [("samples", False), ("start", True)])
def test_draws_of_initial_weights_are_named_only_if_these_differ(cause, named):
    runs = [made(label, [("w", [2], [1.0] * 3, [size] * 3, [1.0] * 3)]) for label, size in (("A", 1.0), ("B", 7.0))]
    for one, value in zip(runs, (1.0, 2.0)):
        one.states(0)[0] |= {"samples": [value, 3.0],
                             "sites": [["a.py:1 (torch.normal_, before the first forward pass)", 8, value, value]]}
    message = trace({"step": 1, "cause": cause, "message": "evidence"}, *runs)["message"]
    assert ("before the first forward pass" in message) == named


def test_the_time_to_match_tensors_is_linear(monkeypatch):
    """Thousands of norms have the same initial value. A few hundred comparisons for each are enough."""
    calls = []
    for module in ("records", "explaining"):
        monkeypatch.setattr(f"verify.{module}.equal", lambda one, two: calls.append(1) or equal(one, two))
    rows, others = ([Row(f"{name}{number}", [4], [2.0 + max(0, number - 1999)] * 3, [0.1], [number] * 3, [1.0] * 3)
                     for number in range(count)] for name, count in (("a", 3000), ("b", 2000)))
    pairs = match(rows, others)
    assert [(one.name[1:], two.name[1:]) for one, two in pairs] == [(str(number),) * 2 for number in range(2000)]
    assert unmatched(rows, others, pairs)[0] == "unknown" and len(calls) < 300 * 5000


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 12345.0])
def test_a_tensor_is_found_by_its_initial_value(size):
    """Zeros, too, as in a LayerNorm's bias, and values that differ by rounding error."""
    [found], [other] = ([Row("w", [4], [value] * 3, [0.1], [1.0] * 3, [1.0] * 3)] for value in (size, size + 1))
    near = found._replace(start=[size * (1 + 1e-12)] * 3)
    assert Starts([other, found]).alike(near) == [1]


def test_a_command_that_fails_in_float64_is_named_with_what_to_do():
    line = float64_fails([None, Failure("exit code 1", "Traceback\nRuntimeError: same dtype, double != float")], [8, 3])
    assert line.startswith("in float64, command B fails after 3 step(s)") and "dtype of another tensor" in line
    assert line.endswith("RuntimeError: same dtype, double != float") and not float64_fails([None, None], [8, 8])
    for error in ("traceback : Signal 6 (SIGABRT) received by PID 8", "TypeError: 'float' object is not callable"):
        line = float64_fails([None, Failure("exit code 1", f"  {error}")], [8, 8])
        assert line.endswith(f"which proves less: {error}")


def test_the_error_of_a_process_without_a_traceback_is_in_torchruns_summary():
    rule, last = "=" * 60, "  traceback : Signal 6 (SIGABRT) received by PID 8"
    text = "\n".join([rule, "train.py FAILED", "-" * 60, "  exitcode  : -6 (pid: 8)", last, rule])
    assert own_error(text).splitlines()[-1] == last and not own_error("")


def test_the_order_of_the_commands_does_not_matter(records):
    report = verify.compare(records / "no set_epoch on 2", records / "right on 1")
    assert (report["cause"], report["step"], report["ranks"]) == ("set-epoch", 7, [2, 1])


def test_a_parameter_is_known_by_its_name_or_by_its_place_or_by_its_weights():
    row = lambda name, shape, start: Row(name, shape, [start] * 3, [0.1], [0.0] * 3, [0.0] * 3)  # noqa: E731
    left = [row("a", [2], 1.0), row("b", [2], 2.0)]
    assert match(left, left[::-1]) == list(zip(left, left))
    assert match(left, [row("x", [2], 5.0), row("y", [2], 6.0)])[0][1][0] == "x"
    assert match(left, [row("0", [2], 2.0)]) == [(left[1], row("0", [2], 2.0))]
    twins = [row(name, [2], 1.0)._replace(grad=[value] * 3) for name, value in (("a", 5), ("b", 6), ("c", 5), ("d", 9))]
    assert match(twins[:2], twins[2:]) == [*zip(twins[:2], twins[2:])]  # each row once, though c is nearer to b
    scalars = [row(name, [], 0.0)._replace(grad=[value, value * (1 + error), -value]) for name, value, error in (
        ("amplitude", 1.0, 0.0), ("bias", 9.0, 0.0), ("amplitude", 1.0, 0.0), ("bias", 9.0, 1e-15))]
    for others in (scalars[2:], scalars[:1:-1]):
        unnamed = [row._replace(name=UNNAMED) for row in others]
        found = match([row._replace(name=UNNAMED) for row in scalars[:2]], unnamed)
        assert [one.grad[0] == pytest.approx(two.grad[0]) for one, two in found] == [True] * 2


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


LARGE = """
import resource, sys, torch
from verify.recording import Recorder
import torch._dynamo  # here, or the optimizer imports it below

Recorder(sys.argv[1])
model = torch.nn.Linear(4096, 2048, bias=False)
model(torch.ones(1, 4096)).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.optim.SGD(model.parameters(), foreach=False).step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.drill
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, ru_maxrss has another unit, or does not exist")
def test_a_digest_needs_little_memory(tmp_path):
    """In MiB. The weight and its gradient have 64 MiB each, in float64."""
    assert int(good(run(PYTHON, "-c", LARGE, tmp_path, env=FROM_ROOT)).out) < 32


def test_a_run_that_fails_does_not_differ(records, tmp_path):
    """verify reports its error, not the missing steps that follow from it."""
    failed = verify.record(f"{PYTHON} {HERE / 'ending.py'} error", tmp_path / "run", 60)
    assert "a picture is broken" in failed.said
    assert verify.compare(records / "well", tmp_path / "run", failed=(None, failed))["cause"] is None
    assert verify.compare(records / "well", tmp_path / "run")["cause"] == "batch-size"


@pytest.mark.parametrize(("right", "printed", "differs"), [
    ("epoch 1  loss 0.513  acc 81.3 %  2.1 s", "[0] epoch 1  loss 0.513  acc 81.3 %  1.7 s", None),
    ("{'val_loss': 0.5130}", "{'val_loss': 0.5131}", None),  # the last digit may be rounded
    ("{'val_loss': 0.5130}", "{'val_loss': 0.5170}", "val_loss 0.5130 and B 0.5170"),
    ("mIoU=0.2", "rank 0: mIoU=0.1\nrank 1: mIoU=0.3", None),  # a line of each rank
    ("train/loss: 1.5e-3", "train/loss: 3e-3", "train/loss 1.5e-3 and B 3e-3"), ("step 7", "step 8", None),
    ("epoch 1 loss 0.51", "epoch 1 loss 0.53", None),  # the loss of rank 0's share
    ("validation: loss 0.51", "validation: loss 0.53", "loss 0.51 and B 0.53")])
def test_metrics_that_both_commands_print_are_compared(right, printed, differs):
    said = printed_differ(right, printed, 1e-6)
    assert differs in said if differs else said is None


def test_the_time_to_read_metrics_is_linear():
    """In a word of a million characters, trying each letter again would take hours."""
    assert printed_differ("a1" * 500_000 + " loss 1", "a1" * 500_000 + " loss 1", 1e-6) is None


def test_a_difference_that_low_precision_allows_is_no_proof():
    rows = [[("weight", [2], [1.0] * 3, [1.0] * 3, [size] * 3)] for size in (1.0, 1.04)]
    a, b = (made(label, found) for label, found in zip("AB", rows))
    a.flags = b.flags = {"torch.bfloat16"}
    report = compare_runs(a, b, native=True)
    assert report["verdict"] == "alike" and "within 0.038: too coarse to prove" in report["message"]


@pytest.mark.parametrize(("native", "sizes", "decay", "verdict"), [
    (True, [2.50002, 3.0, 4.0], "0", "same"), (True, [2.5, 4.0, 4.0], "0", "different"),
    (True, [2.5, 3.0, 4.0], "0.1", "different"), (False, [2.5, 3.0, 4.0], "0", "different"),
    (True, [2.5, 3.0, 30.0], "0", "different")])  # by more than both have moved from 2.5
def test_a_few_updates_from_rounding_errors_are_no_difference_in_low_precision(native, sizes, decay, verdict):
    """As of the bias of attention's keys, whose gradient should be zero: Adam divides it by its own size."""
    a, b = (made(label, [(f"w{number}", [2], [2.5] * 3, [1.0] * 3, [value] * 3) for number, value in enumerate(values)])
            for label, values in (("A", [2.5, 3.0, 3.0]), ("B", sizes)))
    for state, value in zip(a.states(0) + b.states(0), ("0", decay)):
        state["rows"] = [[*row, None, 2, {"weight_decay": value}] for row in state["rows"]]
    report = compare_runs(a, b, native)
    assert report["verdict"] == verdict and report["cause"] == (None if verdict == "same" else "optimizer"), report


@pytest.mark.parametrize(("counts", "clips", "cause", "said"), [
    ([[[4.0] * 4], [[2.0] * 4]], [[], []], "uneven-mean", ": each is divided by its own count, 4 and 2: divide"),
    ([[[4.0] * 4], [[3.0] * 4]], [[[1.0, 0.5]], [[2.0, 0.5]]], "clip", ": clip once per step"),
    ([[[4.0] * 4], [[3.0] * 4]], [[[1.0, 9.0]]] * 2, "clip", ", after equal clip calls: something else"),
    ([[], []], [[], []], "clip", ", after equal clip calls: something else"),
    ([[[0.0] * 4]] * 2, [[], []], "clip", ", after equal clip calls: something else")])
def test_ranks_that_divide_their_gradients_apart_are_told_from_those_that_clip_them(counts, clips, cause, said):
    a, b = differing({}, {}, {})
    for state, factor, count, clip in zip(b.states(0), (1.0, 2.0), counts, clips):
        state["rows"] = [[*row[:4], [factor * value for value in row[4]], row[5]] for row in state["rows"]]
        state["counts"], state["clips"] = count, clip
    report = compare_runs(a, b)
    sure = "not sure: " * ("equal" in said)
    fact = f"{sure}ranks 0 and 1 of B have different gradients, proportional to each other{said}"
    assert report["cause"] == cause and report["message"].startswith(fact), report


def test_a_batch_that_is_read_ahead_belongs_to_the_step_that_trains_on_it():
    read = [[0, 1], [2], [3], []]
    steps = in_step([{"batches": [[0, [], [float(number)], [], []] for number in numbers]} for numbers in read])
    assert [step["samples"] for step in steps] == [[0.0], [1.0], [2.0], [3.0]]


def test_a_mistake_that_one_run_shows_is_found_without_another(records):
    found = {mistake: {finding["cause"] for finding in watch(records / f"{mistake} on 2")["findings"]}
             for mistake in WATCHED}
    assert found == {mistake: {*cause.split(", ")} if cause else set() for mistake, cause in WATCHED.items()}


def test_gradients_that_a_closure_computes_are_seen(records):
    report = watch(records / "closure")
    assert report["verdict"] == "sound" and report["steps"] == [6], report


def made(label, *ranks):
    """Return a run of one step; each rank is a list of (name, shape, start, gradient, value) or of (name, shape)."""
    step = {"event": "step", "batches": [[0, [], [1.0, 2.0], [], []]], "losses": [1.0], "clips": [], "flags": [],
            "resting": 0, "unoptimized": [], "passed": [], "sites": [], "labels": [], "size": 2, "lost": [],
            "stale": [], "counts": [], "weights": [], "graphs": 0, "replicas": False}
    zero = [[0.0] * 3]
    return Run(label, [(rank, [{**step, "rows": [[name, shape, *(more or zero)[:1], [0.1], *(more[1:] or zero * 2)]
                                                 for name, shape, *more in rows]}])
                       for rank, rows in enumerate(ranks)])


def differing(a, *b):
    """Return two runs of one step with other gradients. `a` and `b` have what is special in the state of each rank."""
    runs = []
    for label, states, grad in (("A", [a], [1.0, 1.0, 1.0]), ("B", b, [1.0, 2.0, 3.0])):
        rows = [("v", [2], [1.0] * 3, grad, [1.0] * 3), ("w", [3], [1.0] * 3, [2.0] * 3, [1.0] * 3)]
        runs.append(made(label, *[rows] * len(states)))
        for state, change in zip(runs[-1].states(0), states):
            state |= change
            join_samples(state)
    return runs


def batch(*samples, loader=0, indices=()):
    return {"batches": [[loader, [], [*samples], [], [*indices]]]}


def test_gradients_that_are_added_twice_are_scaled():
    runs = [made(label, [("w", [2], [1.0] * 3, [size] * 3, [1.0] * 3)]) for label, size in (("A", 1.0), ("B", 2.0))]
    runs[1].states(0)[0]["losses"] *= 2
    assert compare_runs(*runs)["cause"] == "scale"


def test_weights_that_differ_by_rounding_are_copies():
    """As after a step to the worst neighbour and back, as in SAM, with another norm on each rank."""
    b = made("B", *[[("w", [2], [1.0, 1.0, 1.0 + rounding], [2.0] * 3, [1.0] * 3)] for rounding in (0, 1e-15)])
    assert len(b.at(0)[1]) == 1
    apart = made("B", *[[("w", [2], [1.0, 1.0, 1.0 + moved], [2.0] * 3, [1.0] * 3)] for moved in (0, 1e-3)])
    assert len(apart.at(0)[1]) == 2
    stages = made("B", *[[("bias", [size], [0.0] * 3, [2.0] * 3, [1.0] * 3)] for size in (2, 3)])
    assert len(stages.at(0)[1]) == 2


CLASSES = [{"weights": [["weight of cross_entropy", [size] * 3]]} for size in (1.0, 2.0)]
BUFFER = [{"unoptimized": [["buffer mean", [1], [size] * 3]]} for size in (1.0, 2.0)]


@pytest.mark.parametrize(("cause", "sure", "a", "b"), [
    ("buffers", False, batch(1.0, 2.0, loader=INPUTS) | BUFFER[0], [batch(3.0, 4.0, loader=INPUTS) | BUFFER[1]]),
    ("samples", True, batch(1.0, 2.0) | BUFFER[0], [batch(3.0, 4.0) | BUFFER[1]]),
    ("buffers", True, {"losses": [1.5]} | BUFFER[0], [BUFFER[1]] * 2),
    ("no-backward", False, {}, [batch(1.0), batch(2.0)]),
    ("uneven-mean", False, {"losses": [1.5]}, [batch(1.0) | {"counts": [[3, 3, 3, 0]]},
                                               batch(2.0) | {"counts": [[5, 5, 5, 0]], "losses": [2.2]}]),
    ("evaluation", False, {"losses": [1.5], "flags": ["evaluated"]}, [{"losses": [1.7]}]),
    ("forward", True, {"losses": [1.5]}, [{"losses": [1.7]}, {"losses": [1.7]}]),
    ("loss", False, {"losses": [1.5]}, [{"losses": [1.7]}]),
    ("loss", True, {"losses": [1.5]} | CLASSES[0], [CLASSES[0], CLASSES[1]]),
    ("clip", True, {"clips": [[0.6, 1.0]]}, [{"clips": [[600.0, 1.0]]}]),
    ("unknown", True, {"clips": [[2.0, 1.0]]}, [{"clips": [[0.0, 1.0]]}]),  # no gradient at all, which is not scaled
    ("unknown", True, {"clips": [[0.6, 1e9]]}, [{"clips": [[600.0, 1e9]]}]),  # nothing was clipped
    ("clip", True, {"clips": [[0.6, 1.0]]}, [{"clips": [[0.6, 1.0], [0.5, 1.0]]}]),
    ("clip", True, {"clips": [[0.0, 1.0]]}, [{}]),  # by value
    ("stale", True, {"losses": [1.5]}, [{"losses": [7.0, 1.0]}, {"losses": [9.0, 2.0]}]),
    ("stale", True, {"losses": [1.5]}, [{"losses": [9.0, 0.5, 8.0, 1.0]}]),
    ("stale", True, {"losses": [1.5]}, [{"losses": [9.0, 8.0, 0.5, 1.0]}]),
    ("loss", True, {"losses": [9.0, 1.5]}, [{"losses": [1.5]}]),
    ("loss", False, {"losses": [1.5]}, [{"losses": [9.0, 1.5], "flags": ["reset"]}]),  # sets them to zero
    ("unknown", True, {"losses": [1.5]}, [{"losses": [1.5, 9.0]}]),  # as with GradCache
    ("loss", False, {"losses": [1.5]}, [{"losses": [9.0, 1.0]}, {"losses": [2.0]}]),
    ("loss", False, {"losses": [1.5]}, [{"losses": [9.0, 1.5, 8.0]}]),
    ("loss", False, {"losses": [1.0, 2.0]}, [{"losses": []}, {"losses": [1.0, 2.5]}]),  # the last stage of a pipeline
    ("unknown", True, {"losses": [0.0]}, [{"losses": [0.0, 0.0]}]),
    ("unknown", True, {"clips": [[0.6, 1.0]]}, [{}])])  # clipped by hand: else, the gradients are proportional
def test_a_rule_says_whether_it_is_sure(cause, sure, a, b):
    report = compare_runs(*differing(a, *b))
    said = report["message"]
    assert (report["cause"], report["column"], not said.startswith("not sure: ")) == (cause, "grad", sure), report


@pytest.mark.parametrize(("b", "flags", "said"), [
    ([0, 1], [], "; ranks differ, too"), ([1, 1], [], "; the ranks of each run agree"),
    ([1, 1], ["sharded"], "on rank 0 of A: ")])  # each rank has the digest of the whole tensor
def test_the_answer_says_whether_buffers_differ_between_ranks(b, flags, said):
    """Another remedy for each: if the ranks agree, to broadcast the buffers changes nothing."""
    losses = {"losses": [1.5]}
    report = compare_runs(*differing(losses | BUFFER[0], *[BUFFER[number] | {"flags": flags} for number in b]))
    assert report["cause"] == "buffers" and said in report["message"]


@pytest.mark.parametrize(("flags", "said"), [({}, "; the ranks of each run agree: "), ({"sharded"}, "are the same: ")])
def test_an_answer_after_the_last_step_says_the_same(flags, said):
    rows = [("w", [2], [0.0] * 3, [1.0] * 3, [1.0] * 3)]
    runs = made("A", rows), made("B", rows, rows)
    for one, buffer in zip(runs, BUFFER):
        one.flags |= {*flags}
        for state in one.states(0):
            state |= buffer
    report = compare_runs(*runs)
    assert report["cause"] == "buffers" and said in report["message"], report


def test_averages_of_a_sharded_model_are_known_to_be_sharded(records):
    assert "sharded" in Run.read(records / "sharded on 2", "B").flags - Run.read(records / "right on 2", "B").flags


@pytest.mark.parametrize(("divisors", "said"), [([[7, 7, 7], [6, 6, 6]], "7, 6"), ([[3, 5, 5]] * 2, "3, 5, 5")])
def test_losses_that_are_divided_by_the_count_of_a_rank_or_a_micro_batch_are_named(divisors, said):
    counts, sums = [[1, 2, 4], [2, 3, 1]], [[3, 9, 2], [10, 5, 6]]
    b = [batch(size) | {"losses": [x / n for x, n in zip(mine, by)], "counts": [[n] * 4 for n in found]}
         for size, mine, by, found in zip((1.0, 2.0), sums, divisors, counts)]
    report = compare_runs(*differing({"losses": [35 / 13]}, *b))
    assert report["cause"] == "uneven-mean" and f"weighted by the counts {said}, give" in report["message"], report


@pytest.mark.parametrize(("whole", "cause"), [(16.0, "uneven-mean"), (17.0, "loss")])
def test_losses_that_are_divided_by_their_counts_may_add_up_to_a_loss_that_is_not(whole, cause):
    """Such as that of a program that divides the gradients later. One batch has a part whose rows are not samples."""
    b = [batch(float(count)) | {"losses": [loss], "counts": [[count] * 4]} for count, loss in ((2, 3.0), (4, 2.5))]
    b[1]["batches"][0][1] = [[9] * 4]
    report = compare_runs(*differing(batch(2.0, 4.0) | {"losses": [whole]}, *b))
    assert report["cause"] == cause and ("weighted by the counts 2, 4, give" in report["message"]) == (
        cause == "uneven-mean"), report


@pytest.mark.parametrize(("whole", "losses", "earlier", "said"), [
    (3.0, (1.0, 0.0), 1.0, "loss: not sure: equal samples; mean loss 3 in A, 0.5 in B; a loss on rank 1 of B is"),
    (3.0, (1.0, 0.0), 0.0, "loss: not sure: equal samples; mean loss 3 in A, 0.5 in B: "),
    (0.0, (-1.0, 0.0), 1.0, "loss: not sure: equal samples; mean loss 0 in A, -0.5 in B: "),
    (0.5, (-1.0, 0.25, 0.0, 0.0), 1.0, "loss: not sure: equal samples; mean loss 0.5 in A, -0.375 in B; a loss on"),
    (2.0, (1.0, 5.0), 1.0, "uneven-mean: not sure: equal samples; mean loss 2 in A, 3 in B; counts, such as those of")])
def test_a_loss_of_0_is_named(whole, losses, earlier, said):
    """Such as that of a rank without boxes, which leaves out the background, too. A rank may have no loss at all."""
    each = len(losses) // 2
    b = [batch(size) | {"losses": losses[rank * each:][:each], "counts": [[count] * 4] * each}
         for rank, size, count in ((0, 1.0, 2), (1, 2.0, 4))]
    runs = differing(batch(1.0, 2.0) | {"losses": [whole]}, *b)
    runs[1].ranks[1].append({**runs[1].ranks[1][0], "losses": [earlier]})
    report = compare_runs(*runs)
    assert f"{report['cause']}: {report['message']}".startswith(said), report


def test_a_rank_that_reads_an_epoch_again_is_named(records):
    folders = [records / name for name in ("right on 1", "set_epoch on rank 0 on 2")]
    report = verify.compare(*folders)
    assert report["message"].startswith("rank 1 of B reads the same samples in steps 7 and 1: "), report
    assert verify.compare(*folders[::-1])["message"].startswith("rank 1 of A reads the same samples"), report


@pytest.mark.parametrize("way", ["repeats", "goes on otherwise", "few", "both", "no set_epoch"])
def test_a_rank_repeats_its_epoch_if_all_that_follows_is_equal(records, way):
    """One batch may be equal by chance, above all a small one."""
    runs = Run.read(records / "right on 2", "A"), Run.read(records / "set_epoch on rank 0 on 2", "B")
    steps = runs[1].ranks[1]
    if way == "goes on otherwise":
        steps[7]["samples"][0] += 1.0
    if way == "few":
        runs[1].length = 7
        for step in steps:
            del step["samples"][2:]
    if way == "both":
        runs[0].ranks[1][:] = [{**step, "samples": [*step["samples"]]} for step in steps]
        runs[0].ranks[0][6]["samples"][0] += 1.0
    for event in runs[1].events[1] if way == "no set_epoch" else ():
        event |= {"sampler": "RandomSampler"}
    found = set_epoch(Difference(*runs, 6, "grad", match(runs[0].at(6)[1], runs[1].at(6)[1])))
    assert found == ("rank 1 of B reads the same samples in steps 7 and 1" if way == "repeats" else None)


def test_a_copy_of_a_part_of_the_model_is_an_average_of_it():
    teacher, student = torch.nn.Linear(2, 3), torch.nn.Linear(2, 2)
    model = torch.nn.ModuleDict({"teacher": teacher.requires_grad_(False), "student": student})
    average, other = copy.deepcopy(student), torch.nn.Linear(3, 2)
    modules, parameters = Modules(), [*student.parameters()]
    modules.find(parameters, {*map(id, parameters)})
    found = {id(item): name for name, item in modules.unoptimized}
    names = [found.get(id(part.weight)) for part in (average, other, model["teacher"])]
    assert names == ["average of weight", None, None]


PASSED = [["input", "Net", True], ["input (integers)", "Net", True], ["input (integers)", "layer", False],
          ["output", "layer", False], ["output", "Net", True], ["input", "Loss", True]]


@pytest.mark.parametrize(("place", "cause", "said"), [
    (0, "samples", "the input of Net differs: look before the model"),
    (1, "loss", "the outputs of all modules agree"),  # an index into the batch depends on how it is divided
    (2, "loss", "the outputs of all modules agree"),  # as do integers from which equal outputs follow
    (3, "forward", "the output of layer differs"),
    (4, "forward", "the output of Net differs"), (5, "loss", "the input of Loss differs, though the outputs before")])
def test_the_first_value_that_differs_tells_the_cause(place, cause, said):
    values = [{"passed": [[*row, 4, 8, size if number == place else 1.0, 1.0] for number, row in enumerate(PASSED)]}
              for size in (1.0, 5.0)]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and said in found["message"], found


@pytest.mark.parametrize("constants", [0, 1])
@pytest.mark.parametrize(("size", "cause"), [(8, "forward"), (16, "loss")])
def test_a_teacher_whose_outputs_have_another_size_is_not_named(size, cause, constants):
    """As in a validation that pads the shares of the ranks. Autograd may not have saved what the loss takes of it."""
    values = [{"passed": [["output", "Net", True, 4, 8, 1.0, 1.0],
                          ["no_grad output", "Teacher", True, 4, rows, mass, 1.0],
                          *[["constant", "MulBackward0 1", True, 1, 8, mass, 1.0 + mass]] * constants]}
              for rows, mass in ((8, 1.0), (size, 5.0))]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and ("Teacher" in found["message"]) == (cause == "forward"), found


def test_indices_that_a_model_passes_on_are_its_input():
    """Else, the input of the layer would differ inside the model."""
    values = [{"passed": [["input (integers)", name, name == "Net", 1, 8, size, size] for name in ("Net", "layer")]}
              for size in (1.0, 5.0)]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == "samples" and "look before the model" in found["message"], found


@pytest.mark.parametrize(("kind", "computed", "cause"), [
    ("input", [["Linear"], [], []], "forward"), ("input", [[], [], []], "samples"),
    ("output", [[], [], []], "forward")])
def test_an_input_that_is_computed_from_weights_is_no_sample(kind, computed, cause):
    values = [{"passed": [[kind, "Linear", True, 4, 8, size, size]], "computed": dict.fromkeys(names, "from weights")}
              for size, names in zip((1.0, 5.0, 5.0), computed)]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and ("from weights" in found["message"]) == any(computed), found


@pytest.mark.parametrize(("kind", "name", "size", "cause"), [
    ("output", "bn", 5.0, "batchnorm"), ("output", "conv", 5.0, "forward"), ("output", "bn", 1.0, "loss"),
    ("input", "Net", 5.0, "samples")])
def test_batchnorm_is_the_cause_if_its_outputs_are_the_first_that_differ(kind, name, size, cause):
    values = [{"passed": [[kind, name, name == "Net", 4, 8, mass, mass]], "norms": ["bn"]} for mass in (1.0, size)]
    found = trace({"step": 1, "cause": "batchnorm", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause, found


def test_the_outputs_of_batchnorm_are_the_first_that_differ(records):
    folders = [records / f"batchnorm on {world}" for world in (1, 2)]
    report = trace(verify.compare(*folders), *map(Run.read, folders, "AB"))
    assert report["cause"] == "batchnorm" and "the output of 1 differs" in report["message"], report


def test_a_step_is_recorded_after_all_hooks_of_the_program_and_once():
    called, optimizer = [], torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    recorder = SimpleNamespace(last_hooks={}, before_step=lambda *_: called.append("recorded"))
    for name in ("first", "second"):
        optimizer.register_step_pre_hook(lambda *_, name=name: called.append(name))
        Recorder.before_hooks(recorder, optimizer, (), {})
    optimizer.step()
    assert called == ["first", "second", "recorded"]


@pytest.mark.parametrize(("special", "cause"), [({}, "loss"), ({"batches": []}, "samples")])
def test_other_targets_are_other_samples_if_the_samples_were_not_seen(special, cause):
    values = [{"passed": [["targets (integers)", "cross_entropy", True, 1, 8, size, size]]} | special
              for size in (1.0, 5.0)]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and "the targets of cross_entropy differ" in found["message"], found


def test_targets_are_compared_if_only_the_last_stage_of_a_pipeline_has_them():
    targets = [{"passed": [["targets (integers)", "cross_entropy", True, 1, 8, size, size]]} for size in (1.0, 5.0)]
    assert first_value(*differing(targets[0], {"passed": []}, targets[1]), 0)[:2] == (
        "targets (integers)", "cross_entropy")


def test_the_targets_of_a_loss_are_noted_without_ignored_ones():
    noted = []
    recorder = SimpleNamespace(native=True, counted=[], weights=[], shows=lambda: True, modules=SimpleNamespace(
        note=lambda *values: noted.append(values)))
    Recorder.criterion(recorder, torch.nn.functional.cross_entropy, torch.ones(3, 2), torch.tensor([1, -100, 0]))
    [[kind, name, outermost, [targets]]] = noted
    assert (kind, name, outermost, targets.tolist()) == ("targets", "cross_entropy", True, [1, 0])


@pytest.mark.parametrize(("last", "before", "clips", "cause"), [
    ([9.0, 3.0, -1.0], "w", [], "stale"), ([9.0, 3.0, -2.0], "w", [], "unknown"),
    ([9.0, 3.0, -1.0], "v", [], "unknown"), ([9.0, 1.5, -0.5], "w", [[4.0, 2.0 + 5e-7]], "stale")])
def test_gradients_that_an_accumulator_keeps_are_stale(last, before, clips, cause):
    """Before, another optimizer may have changed another tensor."""
    runs = []
    for label, grad in (("A", [2.0, 2.0, -2.0]), ("B", last)):
        runs.append(made(label, [("w", [2], [1.0] * 3, grad, [1.0] * 3)]))
        steps = runs[-1].ranks[0]
        steps.insert(0, {**steps[0], "rows": [[before, [2], [1.0] * 3, [0.1], [1.0] * 3, [1.0] * 3]]})
        runs[-1].length = 2
    runs[1].states(1)[0]["clips"] = clips
    runs[0].states(1)[0]["clips"] = [[1.0, 2.0]] * len(clips)
    assert compare_runs(*runs)["cause"] == cause


@pytest.mark.parametrize(("early", "cause"), [((), "reset"), (("reset",), "no-backward")])
def test_a_program_that_has_always_reset_gradients_adds_them_up_by_hand(early, cause):
    a, b = preceded(differing(batch(1.0, 2.0), batch(1.0), batch(2.0) | {"flags": ["reset"]}), [1.0, 2.0], [1.0], [2.0])
    b.flags = {"reset"}
    for state in b.states(0):
        state["flags"] = [*early]
    assert compare_runs(a, b)["cause"] == cause


@pytest.mark.parametrize(("resets", "losses", "cause", "sure"), [
    ("b", [0.5, 1.0], "reset", True), ("b", [0.5, 1.2], "reset", False), ("a", [0.5, 1.2], "stale", True),
    ("a", [1.2], "loss", False), ("ab", [0.5, 1.2], "loss", False)])
def test_gradients_that_one_run_sets_to_zero_may_be_those_of_another_loss(resets, losses, cause, sure):
    """If A, which is right, sets them to zero, B should: it has as many backward passes."""
    runs = differing({"losses": [0.5, 1.0]}, {"losses": losses})
    for each, name in zip(runs, "ab"):
        each.flags = {"reset"} if name in resets else set()
    report = compare_runs(*runs)
    assert (report["cause"], not report["message"].startswith("not sure: ")) == (cause, sure), report


@pytest.mark.parametrize("sure", [True, False])
def test_an_unsure_reset_is_looked_at_again(sure):
    """The pass before may be that of an attack, whose gradients B sets to zero, as it should."""
    values = [{"passed": [["targets (integers)", "cross_entropy", True, 1, 8, size, size]]} for size in (1.0, 5.0)]
    message = "evidence" if sure else "not sure: evidence"
    found = trace({"step": 1, "cause": "reset", "message": message}, *differing(*values))
    assert found["cause"] == ("reset" if sure else "loss"), found


@pytest.mark.parametrize(("losses", "reach", "cause"), [
    ([1.0], 2, "no-gradient"), ([1.5], 2, "loss"), ([1.5], 0, "no-gradient")])
def test_a_gradient_that_autograd_computes_as_zero_follows_from_another_loss(losses, reach, cause):
    runs = [made(label, [("v", [2], [1.0] * 3, grad, [1.0] * 3), ("w", [3], [1.0] * 3, grad, [1.0] * 3, None, reach),
                         ("x", [4], [1.0] * 3, [2.0] * 3, [1.0] * 3)])
            for label, grad in (("A", [1.0] * 3), ("B", [0.0] * 3))]
    runs[1].states(0)[0]["losses"] = losses
    assert compare_runs(*runs)["cause"] == cause


@pytest.mark.parametrize(("read", "factor", "cause"), [
    ("aabb", 0, "no-backward"), ("abab", 0, "samples"), ("abcd", 0, "not-averaged"), ("abca", 0, "not-averaged"),
    ("aabb", 2, "clip")])
def test_ranks_with_parts_of_one_tensor_read_the_same_samples(read, factor, cause):
    """Ranks 0 and 1, and ranks 2 and 3, have the parts of one tensor. Ranks that clip have proportional gradients."""
    def parts(number, grad):
        grad = [0.1 * factor ** number, 0.2 * factor ** number] if factor else grad
        return [("split", [4], [3.0 + number, 1.0, 1.0], [1.0, 0.3, 0.4], [1.0] * 3, [number, 0.5]),
                *[(name, [size], [1.0] * 3, [float(factor or 1) ** number, *grad], [1.0] * 3)
                  for name, size in (("norm", 2), ("head", 3))]]

    a = made("A", [("split", [4], [5.0, 2.0, 2.0], [1.4, 0.6, 0.8], [1.0] * 3),
                   ("norm", [2], [1.0] * 3, [1.0, 5.0, 7.0], [1.0] * 3),
                   ("head", [3], [1.0] * 3, [1.0, 2.0, 9.0], [1.0] * 3)])
    b = made("B", *[parts(rank % 2, [0.1 + rank % 2, 0.2 - rank % 2]) for rank in range(4)])
    for state, name in zip(b.states(0), read):
        state["batches"] = [[0, [], [float(ord(name))], [], []]]
        join_samples(state)
    report = compare_runs(a, b)
    assert report["cause"] == cause, report
    assert ("ranks 0 and 2, which have the same parts, read the same" in report["message"]) == (cause == "samples")


@pytest.mark.parametrize(("size", "cause", "said"), [
    (1.0, "loss", "the outputs of all modules agree"), (2.0, "forward", "the input (integers) of layer differs")])
def test_integers_matter_only_if_what_follows_from_them_differs(size, cause, said):
    """Such as the edges of a collated graph, which depend on the split."""
    values = [{"passed": [["input (integers)", "layer", False, 1, 8, edges, edges],
                          ["output", "layer", False, 4, 8, mass, mass]]} for edges, mass in ((1.0, 1.0), (5.0, size))]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and said in found["message"], found


@pytest.mark.parametrize(("cause", "size", "said"), [
    ("no-backward", 5.0, "the outputs of all modules agree"), ("no-backward", 6.0, "the output of Net differs"),
    ("loss", 5.0, "the output of Net differs")])
def test_after_equal_losses_values_in_another_order_are_equal(cause, size, said):
    """Such as the logits for gathered rows, which stand in the order of the ranks."""
    values = [{"passed": [["output", "Net", True, 4, 8, *sums]]} for sums in ((5.0, 1.0), (size, 3.0))]
    found = trace({"step": 1, "cause": cause, "message": "evidence"}, *differing(*values))
    assert said in found["message"], found


@pytest.mark.parametrize(("size", "named"), [(1.0, True), (2.0, False)])
def test_gradients_of_equal_size_for_different_parts_of_a_tensor_are_named(size, named):
    a = made("A", [("experts", [4], [5.0, 3.0, 3.0], [1.7, 0.9, 0.1], [1.0] * 3)])
    b = made("B", [("experts", [4], [3.0, 1.0, 1.0], [1.0, 0.3, 0.4], [1.0] * 3, [1, 0.5])],
             [("experts", [4], [4.0, 2.0, 2.0], [size, 0.1, 0.2], [1.0] * 3, [2, 0.5])])
    message = compare_runs(a, b)["message"]
    assert ("gradients of equal size for different parts of experts" in message) == named, message


@pytest.mark.parametrize(("third", "place"), [(3.0, ()), (4.0, ("input", "Linear", 1))])
def test_equal_values_of_a_tensor_parallel_group_count_once(third, place):
    """Of four ranks, two by two compute with the same half of the batch."""
    sizes = [(16, 5.0), (8, 2.0), (8, 2.0), (8, third), (8, third)]
    values = [{"passed": [["input", "Linear", True, 4, number, size, size]]} for number, size in sizes]
    assert first_value(*differing(*values), 0) == place


def test_a_mean_loss_is_that_of_the_ranks_that_have_one():
    """Of two stages with two replicas each, the last ones have a loss; if it agrees, the samples do."""
    states = [{"losses": losses, "batches": []} for losses in ([1.5], [], [1.0], [], [2.0])]
    assert compare_runs(*differing(*states))["cause"] == "no-backward"
    states[-1]["losses"] = [2.5]
    assert compare_runs(*differing(*states))["cause"] == "loss"


@pytest.mark.parametrize(("second", "cause"), [(2.0, "start"), (1.0, "not-averaged")])
def test_parts_that_start_equal_on_all_ranks_in_place_of_different_ones_are_named(second, cause):
    def rows(*experts):
        return [(name, [2], [start] * 3, [grad] * 3, [1.0] * 3) for name, start, grad in experts]

    a = made("A", rows(("experts.0", 1.0, 1.0), ("experts.1", second, 3.0)))
    report = compare_runs(a, made("B", rows(("experts.0", 1.0, 1.0)), rows(("experts.0", 1.0, 2.0))))
    assert report["cause"] == cause, report
    assert ("such as experts.1, start with values that no rank of B has" in report["message"]) == (cause == "start")


@pytest.mark.parametrize(("weigh", "centered", "cause"), [
    (lambda mask: mask.float(), False, "uneven-mean"), (lambda mask: 2.0 * mask, False, "uneven-mean"),
    (lambda mask: torch.ones(mask.shape), False, "loss"), (lambda mask: torch.ones(mask.shape).bool(), False, "loss"),
    (lambda mask: mask.float(), True, "uneven-mean")])
def test_what_enters_the_loss_besides_outputs_is_compared(weigh, centered, cause):
    """One program masks all rows, and two ranks mask their own; both may divide by the sum of what they use.

    Weights of classes are equal on all ranks, and `centered` outputs need a gradient: neither says anything.
    """
    torch.manual_seed(0)
    layer, mask = torch.nn.Linear(2, 3), torch.tensor([1, 0, 1, 1]).bool()
    rows, classes, states = torch.randn(4, 2), torch.tensor([1.0, 2.0, 3.0]), []
    for part, form in ((slice(4), lambda mask: mask.float()), (slice(2), weigh), (slice(2, 4), weigh)):
        modules, weights = Modules(), form(mask[part])
        modules.names = {id(layer): "layer"}
        out = layer(rows[part])
        modules.passes("output", layer, out, True)
        values = (out - out.mean() if centered else out).square() * classes
        modules.constants((values.sum(1) * weights).sum() / weights.sum())
        states.append({"passed": modules.passed})
    found = trace({"step": 1, "cause": "uneven-mean", "message": "not sure: evidence"}, *differing(*states))
    assert found["cause"] == cause and "the outputs of all modules agree" in found["message"], found
    assert ("enters the loss" in found["message"]) == (cause == "loss")


def test_samples_that_were_not_seen_agree_if_all_inputs_do():
    values = [{"passed": [["input", "Net", True, 4, 8, 1.0, 1.0]]}] * 2
    message = "not sure: the samples were not seen, so they may differ; mean loss 1 in A, 2 in B"
    found = trace({"step": 1, "cause": "loss", "message": message}, *differing(*values))
    assert found["message"].startswith("mean loss 1 in A, 2 in B\nthe outputs of all modules agree"), found


def test_points_that_need_a_gradient_are_not_taken_for_the_outputs_of_another_model():
    points = torch.rand(4, 2).clone().requires_grad_()
    mixed = torch.cat([points, torch.rand(2, 2)])
    assert not from_parameters(torch.rand(2)) and not from_parameters(points) and not from_parameters(mixed)
    assert from_parameters(torch.cat([points, torch.nn.Linear(2, 2)(mixed)]))


def test_a_rank_without_a_loss_is_no_hindrance():
    """As a pipeline's first stage."""
    b = [batch(1.0) | {"losses": [2.5], "counts": [[3] * 4]}, batch(2.0) | {"losses": [], "counts": []}]
    assert compare_runs(*differing({"losses": [1.5]}, *b))["cause"] == "loss"


def test_the_loss_of_a_module_is_no_output_that_must_agree():
    """It is that of each rank's share."""
    criterion, modules = torch.nn.MSELoss(), Modules()
    modules.names = {id(criterion): "MSELoss"}
    modules.passes("output", criterion, torch.tensor(1.0), True)
    modules.passes("input", criterion, torch.tensor(1.0), True)
    assert [kind for kind, *_ in modules.passed] == ["input"]


def preceded(runs, *samples):
    """Insert a step with equal gradients before the only step of two runs; `samples` has those of each rank."""
    for steps, found in zip([steps for either in runs for steps in either.ranks.values()], samples):
        rows = [[*row[:4], [1.0] * 3, row[5]] for row in steps[0]["rows"]]
        steps.insert(0, {**steps[0], **batch(*found, loader=steps[0]["batches"][0][0]), "rows": rows})
        join_samples(steps[0])
    for either in runs:
        either.length = 2
    return runs


@pytest.mark.parametrize(("before", "second", "cause"), [
    ([1.0, 2.0], batch(4.0), "samples"), ([5.0, 6.0], batch(4.0), "no-backward"),
    ([5.0, 6.0], batch(4.0, indices=(1, 2)), "samples"), ([5.0, 6.0], batch(4.0, 5.0), "batch-size")])
def test_samples_are_no_evidence_if_they_differ_before_too(before, second, cause):
    """They are padded to other lengths, unless the sampler draws other indices."""
    report = compare_runs(*preceded(differing(batch(1.0, 2.0), batch(3.0), second), [1.0, 2.0], before[:1], before[1:]))
    assert (report["step"], report["cause"]) == (2, cause), report


def test_the_answer_says_for_how_many_steps_samples_were_equal():
    runs = differing(batch(1.0, 2.0, indices=(1, 2)), batch(3.0, indices=(1,)), batch(4.0, indices=(2,)))
    report = compare_runs(*preceded(runs, [7.0, 8.0], [7.0], [8.0]))
    assert "are in both runs, after 1 step(s) with equal ones; the indices agree" in report["message"], report


def test_zeros_are_not_the_same_samples_again():
    """They are the first state of a recurrent model, which B loses in each step."""
    runs = differing(batch(3.0, 4.0, loader=INPUTS), batch(0.0, 0.0, loader=INPUTS))
    report = compare_runs(*preceded(runs, [0.0, 0.0], [0.0, 0.0]))
    assert report["step"] == 2 and "inputs of models are in both runs" in report["message"], report


def test_ranks_that_skip_different_steps_stop_at_different_ones():
    """Only rank 0 has skipped a batch: its gradients in the next step are those of another batch."""
    first = made("B", *[[("w", [2], [1.0] * 3, [1.0] * 3, [1.0] * 3)]] * 2).states(0)[0]
    other = {**first, "rows": [[*row[:4], [2.0] * 3, row[5]] for row in first["rows"]]}
    a, b = Run("A", [(0, [first] * 3)]), Run("B", [(0, [first, other]), (1, [first] * 3)])
    report = compare_runs(a, b)
    assert (report["cause"], report["step"]) == ("rank-stops", 2) and "take [2, 3] steps" in report["message"], report


def test_a_rank_that_has_failed_has_not_stopped():
    step = made("B", [("w", [2])]).states(0)[0]
    failed = Run("B", [(0, [step, {"event": "failed"}]), (1, [step, step])])
    assert not unequal_steps(failed, None) and unequal_steps(Run("B", [(0, [step]), (1, [step, step])]), None)


def test_gradients_after_the_backward_pass_are_known_for_all_parameters_or_none():
    ones = torch.ones(2)
    assert digest_if_known([ones, None], [None, None]) == [None, None] != digest_if_known([ones], [None])


def test_one_gradient_of_several_that_is_not_averaged_is_said_to_be_one():
    a, b = differing({}, {}, {})
    b.states(0)[1]["rows"][0][4] = [2.0, 4.0, 6.0]  # one gradient alone is no proof that all are proportional
    for state in b.states(0):
        state["batches"] = [[0, [], [1.0], [], []]]
        join_samples(state)
    report = compare_runs(a, b)
    said = "ranks 0 and 1 of B have different gradients of 1 of 2 tensors, such as v, so average these, too"
    assert report["cause"] == "not-averaged" and report["message"].startswith(said), report


@pytest.mark.parametrize(("name", "values", "other", "places"), [
    ("w", [3, 4], "w", (2, 3)), ("w", [3, 4], "parameter", None),  # of a vector of all tensors
    ("parameter", [3, 4], "w", (2, 3)), ("w", [5, 6, 0, 7], "w", (4, 5)),  # padding may be random
    # what surrounds these are other tensors
    ("parameter", [8, 3, 4, 9], "w", None), ("parameter", [8, 9, 1, 2], "w", None),
    ("parameter", [5, 6, 7, 8, 9], "w", None)])
def test_a_part_of_a_tensor_has_only_values_of_it_and_padding(name, values, other, places):
    whole = torch.arange(1.0, 7.0)
    part, = find_parts([name], [torch.tensor(values, dtype=torch.double)], [(other, [6], marks(whole))], 0)
    assert (part and part.places) == places


def test_flat_shards_may_be_those_of_the_first_command(records):
    assert verify.compare(records / "flat on 2", records / "right on 1")["verdict"] == "same"
    assert verify.compare(records / "flat, decayed on 2", records / "right on 1")["cause"] == "optimizer"


def test_what_divides_a_loss_has_its_number_and_its_line():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        x = torch.ones(3, requires_grad=True)
        first = x.sum() / torch.tensor(4)
        loss = first + (x / torch.ones(3)).sum() / 2
    modules, line = Modules(), first.grad_fn.metadata["traceback_"][-1].split("line ")[1].split(",")[0]
    modules.constants(loss)
    found = [[which, [round(value, 6) for value in sums], int(place.split(":")[1]) - int(line)]
             for which, sums, place in modules.divisors]
    assert sorted(found) == [["() 1", [4.0], 0], ["() 2", [2.0], 1], ["(3,) 1", [3.0, -1.248081], 1]], found


@pytest.mark.parametrize(("change", "flat"), [
    ({}, True), ({"name": "w"}, False),  # the optimizer has a tensor of the module
    ({"shape": [2]}, False),  # a copy of the weight, as in float32: its gradients can be compared
    ({"grad": 0.0}, False),  # the optimizer was created before the model was moved
    ({"moved": 1.0}, False),  # the program trains its own tensor, not the module
    ({"states": [{"exp_avg": [1.0] * 3}]}, False),  # --resume compares the shards
    ({"second": "w"}, False)])  # the module's own optimizer steps later
def test_weights_are_compared_if_the_optimizer_has_flat_shards(change, flat):
    change = {"name": "parameter", "shape": [1], "grad": 1.0, "moved": 2.0} | change
    row = change["name"], change["shape"], [1.0] * 3, [change["grad"]] * 3, [2.0] * 3
    steps = [{**made("B", [row]).states(0)[0], "unoptimized": [["weight w", [2], [value] * 3]],
              "states": change.get("states", [])} for value in (1.0, change["moved"])]
    steps[1]["rows"] = [[change.get("second", change["name"]), *row[1:]] for row in steps[1]["rows"]]
    run = Run("B", [(0, [*steps, {"event": "end", "unoptimized": [["weight w", [2], [3.0] * 3]]}])])
    assert run.flat == flat and run.length == 2
    found = [(row.name, row.start[0], row.value[0]) for step in range(2) for row in run.at(step)[1]]
    assert (found == [("w", 1.0, 2.0), ("w", 1.0, 3.0)]) == flat
    assert Run("B", [(0, steps)]).length == 2 - flat  # the weights after the last step are not known


def test_flat_shards_with_several_rates_are_compared_without_these():
    step = {**made("", [("w", [2])]).states(0)[0], "states": []}
    shards = [["parameter", [1], [1.0] * 3, [rate], [1.0] * 3, [2.0] * 3] for rate in (0.1, 0.2)]
    weights = [[["weight w", [2], [value] * 3]] for value in (1.0, 2.0, 3.0)]
    flat = [{**step, "rows": shards, "unoptimized": found} for found in weights[:2]]
    flat.append({"event": "end", "unoptimized": weights[2]})
    whole = [{**step, "rows": [["w", [2], [1.0] * 3, [0.1], [1.0] * 3, [value] * 3]]} for value in (2.0, 3.0)]
    for one, two in ((flat, whole), (whole, flat)):
        report = compare_runs(Run("A", [(0, copy.deepcopy(one))]), Run("B", [(0, copy.deepcopy(two))]))
        assert report["verdict"] == "same", report


def test_unknown_gradients_and_rates_are_those_of_the_other_run():
    flat, other = (Row("w", [2], [1.0] * 3, rate, grad, [value] * 3) for rate, grad, value in (
        (MIXED, UNKNOWN, 1.0), ([0.1], [2.0, 1.0, 0.5], 2.0)))
    assert filled(flat, other) == other._replace(value=flat.value) and filled(other, flat) == other
    assert filled(flat._replace(rate=[0.2]), other).rate == [0.2]


@pytest.mark.parametrize("flat", [True, False])
def test_gradients_of_flat_shards_are_set_by_hand_and_not_stale(flat):
    sides = [SimpleNamespace(states=[{"stale": found}]) for found in ([], ["SGD"])]
    assert bool(stale(SimpleNamespace(flat=flat, sides=sides))) != flat


@pytest.mark.parametrize(("name", "said"), [("parameter", True), ("w", False)])
def test_an_optimizer_of_tensors_that_no_module_has_is_named(name, said):
    a, b = (made(label, [(name, [2], [1.0] * 3, [grad] * 3, [1.0] * 3)]) for label, grad in (("A", 1.0), ("B", 0.0)))
    report = compare_runs(a, b)
    assert report["cause"] == "no-gradient" and ("no module has them" in report["message"]) == said, report


@pytest.mark.parametrize(("before", "loader", "kind", "cause"), [
    ("loss", 0, "numpy, integers", "samples"),  # such as negatives, which come from no loader
    ("loss", INPUTS, "numpy, integers", "forward"),  # the samples are equal, so each rank has drawn its own
    ("loss", 0, "torch, before the first forward pass", "forward"),  # such as initial weights
    ("buffers", 0, "torch", "samples")])
def test_a_line_that_draws_other_numbers_comes_before_a_fallback(before, loader, kind, cause):
    states = [batch(1.0, 2.0, loader=loader) | {
        "passed": [["input (integers)", "layer", False, 4, 8, size, 1.0]],
        "sites": [[f"p.py:1 ({kind})", 4, size, 1.0]]}
        for size in (1.0, 5.0)]
    found = trace({"step": 1, "cause": before, "message": "not sure: evidence"}, *differing(*states))
    assert found["cause"] == cause and ("p.py:1" in found["message"]) == (cause == "samples"), found


def test_a_line_that_draws_other_numbers_comes_before_a_size():
    states = [batch(1.0, 2.0) | {"passed": [["output", "Net", True, 4, size, 1.0, 1.0]],
                                 "sites": [["p.py:1 (torch)", 4, float(size), 1.0]]} for size in (8, 12)]
    found = trace({"step": 1, "cause": "loss", "message": "not sure: evidence"}, *differing(*states))
    assert found["message"].startswith("the program draws other random numbers for this step"), found


@pytest.mark.parametrize(("rates", "grad", "only"), [
    ([0.0, torch.tensor(0.0)], 0.0, True), ([0.0, 0.1], 0.0, False), ([0.0, 0.0], 1.0, False),  # such as a warm-up
    ([None, None], 0.0, False)])  # an optimizer without rates
def test_a_step_without_rate_and_gradients_is_none_of_training(rates, grad, only):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in rates]
    for item in parameters:
        item.grad = torch.full((2,), grad)
    groups = [{"params": [item], "lr": rate} for item, rate in zip(parameters, rates)]
    assert only_creates_state(SimpleNamespace(param_groups=groups), parameters) == only


def test_an_optimizer_that_wraps_another_has_the_name_of_that():
    outer = SimpleNamespace(optim=torch.optim.SGD([torch.zeros(1)], 0.1))
    assert options_of(outer, 0, {})["optimizer"] == "SGD" == options_of(outer.optim, 0, {})["optimizer"]


@pytest.mark.parametrize(("second", "cause"), [(5.0, "random"), (1.0, "not-averaged")])
def test_a_rank_that_draws_other_numbers_than_rank_0_is_seen(second, cause):
    """Each rank of a tensor-parallel group draws as many numbers as the one process."""
    states = [{"sites": [["p.py:1 (torch)", 4, size, 1.0]]} for size in (1.0, second)]
    report = {"step": 1, "cause": "not-averaged", "message": "not sure: ranks differ"}
    found = trace(report, *differing(states[0], *states))
    assert found["cause"] == cause and ("p.py:1" in found["message"]) == (cause == "random"), found


@pytest.mark.parametrize(("widths", "size", "place"), [
    ([9, 14], 20, ()), ([14, 14], 20, ("input", "Net", 1)), ([9, 14], 24, ("input", "Net", 1))])
def test_the_width_of_some_micro_batches_is_a_length(widths, size, place):
    """Of other samples, if a value of all micro-batches has another size."""
    values = [{"passed": [["input", "Net", True, width, 2 * width, each, each] for width in widths]
                         + [["input", "Net", True, 4, rows, 1.0, 1.0]] * 2} for rows, each in ((24, 1.0), (size, 5.0))]
    assert first_value(*differing(*values), 0) == place


@pytest.mark.parametrize(("ranks", "cause"), [([16, 16], False), ([8, 8], False), ([8, 7], True), ([0, 0], True)])
def test_gradients_in_the_loss_may_be_split_over_the_ranks(ranks, cause):
    """Such as those of a population of models."""
    a, b = differing({"graphs": 16}, *[{"graphs": number} for number in ranks])
    assert (compare_runs(a, b)["cause"] == "no-gradient") == cause


def test_ranks_that_each_read_the_whole_batch_need_not_average():
    a, b = differing({}, {}, {})
    b.states(0)[1]["rows"][0][4] = [9.0] * 3
    report = compare_runs(a, b)
    assert report["cause"] == "not-averaged" and report["message"].startswith("not sure: ranks 0 and 1 of B")
    found = trace(report, a, b)
    assert found["message"].startswith("not sure: ") and found["cause"] == "not-averaged"  # nothing was recorded
    for state in (*a.states(0), *b.states(0)):
        state["passed"] = [["output", "Net", True, 4, 8, 1.0, 1.0]]
    assert trace(report, *differing(*a.states(0), *b.states(0)))["message"].startswith("ranks 0 and 1 of B")


@pytest.mark.parametrize(("met", "verdict"), [(2.0, "different"), (1.0, "alike")])
def test_weights_that_are_averaged_after_each_step_are_no_gradients(met, verdict):
    """Only with plain SGD is it the same."""
    step = made("A", [("w", [2])]).states(0)[0]

    def run(label, *ranks):
        return Run(label, [(rank, [{**step, **{when: [["w", [2], [size] * 3]] for when, size in zip(
            ("before", "after"), sizes)}} for sizes in steps]) for rank, steps in enumerate(ranks)])

    report = compare_runs(run("A", [(0.0, 1.0), (1.0, 3.0)]),
                          run("B", [(0.0, 0.5), (met, 2.0)], [(0.0, 1.5), (met, 4.0)]))
    assert (report["verdict"], report["cause"]) == (verdict, "not-averaged" if met == 2.0 else None), report


@pytest.mark.parametrize(("values", "found"), [((0.5, 1.5), (math.inf, [])), ((0.5, 0.5), (0, []))])
@pytest.mark.parametrize("end", [math.nan, 1e43])
def test_ranks_that_train_apart_and_diverge_have_not_met(end, values, found):
    """NaN or a huge number is no weight that they share. Replicas that diverge are not apart."""
    step = made("A", [("w", [2])]).states(0)[0]
    ranks = [[{**step, "before": [["w", [2], [before] * 3]], "after": [["w", [2], [after] * 3]]}
              for before, after in ((0.0, value), (end, end))] for value in values]
    run = Run("B", [*enumerate(ranks)])
    assert run.trains_apart() == found


@pytest.mark.parametrize(("step", "cause"), [(0, "start"), (1, "buffers")])
def test_a_copy_that_differs_before_the_first_step_is_a_weight_that_starts_apart(step, cause):
    """Such as a target network that is copied before DDP sends the weights of rank 0."""
    average = [{"unoptimized": [["average of w", [1], [size] * 3]]} for size in (1.0, 2.0)]
    a, b = differing({"losses": [1.5]} | average[0], *average)
    difference = Difference(a, b, 0, "grad", match(a.at(0)[1], b.at(0)[1]))
    difference.step = step
    assert difference.explain()[0] == cause


def test_a_copy_that_starts_apart_comes_before_a_buffer_that_follows_from_its_outputs():
    """Such as the center of DINO's loss, which differs on rank 0, too, because the teacher of rank 1 does."""
    copies = [{"unoptimized": [["other buffer center", [1], [center] * 3], ["average of w", [1], [weight] * 3]]}
              for center, weight in ((1.0, 1.0), (2.0, 1.0), (2.0, 5.0))]
    report = compare_runs(*differing({"losses": [1.5]} | copies[0], *copies[1:]))
    assert report["cause"] == "start" and "average of w on rank 1 of B" in report["message"], report


def test_an_average_that_differs_comes_before_a_rate_that_follows_from_it():
    """As if only rank 0 updated it, and the scheduler took its loss."""
    step = made("A", [("w", [2])]).states(0)[0]

    def run(label, averages, rate):
        steps = [{**step, "rows": [["w", [2], [0.0] * 3, [0.1 if number == 0 else rate], [1.0] * 3, [1.0] * 3]],
                  "unoptimized": [["average of w", [2], [average] * 3]]} for number, average in enumerate(averages)]
        return Run(label, [(0, steps)])

    for averages, cause in (([1.0, 1.0, 1.0], "learning-rate"), ([1.0, 1.0, 2.0], "learning-rate"),
                            ([1.0, 2.0, 2.0], "buffers")):
        report = compare_runs(run("A", [1.0, 1.0, 1.0], 0.1), run("B", averages, 0.2))
        assert (report["verdict"], report["cause"]) == ("different", cause), report


def test_the_earliest_difference_of_an_average_is_reported():
    """As of ranks, before one of rank 0 and the other run that follows from it."""
    step = made("A", [("w", [2], [0.0] * 3, [1.0] * 3, [1.0] * 3)]).states(0)[0]

    def run(label, *ranks):
        return Run(label, [(rank, [{**step, "unoptimized": [["average of w", [2], [size] * 3]]} for size in sizes])
                           for rank, sizes in enumerate(ranks)])

    report = compare_runs(run("A", [1.0, 1.0, 1.0]), run("B", [1.0, 1.0, 2.0], [1.0, 4.0, 4.0]))
    assert (report["cause"], report["step"]) == ("buffers", 1), report
    assert "differs between ranks 0 and 1 of B" in report["message"]
    report = compare_runs(run("A", [1.0]), run("B", [1.0], [4.0]))  # it differs when it is first recorded
    assert report["cause"] == "start" and "of B; copy the model after its weights are equal: " in report["message"]


@pytest.mark.parametrize(("other", "said"), [(3.0, "so the datasets differ, or only some samples"), (1.0, "")])
def test_indices_of_two_subsets_are_not_taken_for_equal_samples(other, said):
    report = compare_runs(*differing(batch(1.0, 2.0, indices=[0, 1]), batch(1.0, other, indices=[0, 1])))
    assert report["cause"] == "samples" and said in report["message"]


@pytest.mark.parametrize(("a", "b", "cut", "cause", "said"), [
    ([1.0, 2.0], [[1.0, 2.0], [1.0, 3.0]], 1, "not-averaged", "equal on the ranks of B in the first call"),
    ([1.0, 2.0], [[1.0, 3.0], [1.0, 3.0]], 1, "optimizer", "equal on A and B in the first call"),
    ([1.0, 1.0], [[1.0, 1.0], [1.0, 1.0]], 1, "forward", "the output of layer differs"),
    ([1.0, 1.0], [[1.0, 1.0], [3.0, 3.0]], 2, "forward", "the output of layer differs"),  # slices of one module
    ([1.0, 1.0], [[1.0, 1.0], [3.0, 3.0]], 1, "loss", "evidence")])  # another module of that name, as in a pipeline
def test_weights_that_change_within_a_step_are_named(a, b, cut, cause, said):
    states = [{"passed": [["output", "layer", False, 4, 8, output, 1.0],
                          *[["weights", "layer", False, 0, 1, size, 1.0] for size in calls]]}
              for output, calls in ((1.0, a), *((5.0, calls) for calls in b))]
    runs = differing(*states)
    runs[1].cut = cut
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *runs)
    assert found["cause"] == cause and said in found["message"], found
    assert "layer" in found["message"] or cause == "loss"


@pytest.mark.parametrize(("a", "b", "cause"), [
    ([3.0, 1.0], [[2.0, 1.0], [4.0, 1.0]], "optimizer"), ([3.0, 1.0], [[1.0, 1.0], [2.0, 1.0]], "optimizer"),
    ([3.0, 1.0], [[3.0, 1.0], [4.0, 1.0]], "loss"), ([3.0, 1.0], [[3.0], [4.0]], "optimizer"),
    ([], [[], []], "optimizer")])
def test_a_loss_that_differs_before_the_weights_change_comes_first(a, b, cause):
    """As in the first of SAM's two passes. Means or sums over the ranks must agree."""
    states = [{"losses": losses, "passed": [["output", "layer", False, 4, 8, output, 1.0],
                                            *[["weights", "layer", False, 0, 1, size, 1.0] for size in weights]]}
              for losses, output, *weights in ((a, 1.0, 1.0, 2.0), *((part, 5.0, 1.0, 3.0) for part in b))]
    runs = differing(*states)
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *runs)
    assert found["cause"] == cause and ("not sure: the losses" in found["message"]) == (cause == "loss"), found
    runs[1].states(0)[1]["passed"][-1][-2] = 4.0  # the ranks of B change them differently: this is no guess
    assert trace({"step": 1, "cause": "loss", "message": "evidence"}, *runs)["cause"] == "not-averaged"


@pytest.mark.parametrize(("loader", "said"), [(0, "evidence"), (INPUTS, "evidence\nthe output of Net differs")])
def test_values_explain_samples_only_if_these_are_inputs_of_models(loader, said):
    values = [batch(size, loader=loader) | {"passed": [["output", "Net", True, 4, 8, size, 1]]} for size in (1.0, 5.0)]
    assert trace({"step": 1, "cause": "samples", "message": "evidence"}, *differing(*values))["message"] == said


def test_tensors_with_equal_starts_are_matched_by_the_direction_of_their_gradients():
    """Such as norms, if all gradients are four times as large."""
    grads = [4.0, 3.0, 2.6], [1.0, 0.9, 0.43]
    left, right = ([Row(str(factor * number), [2], [1.0] * 3, [0.1], [factor * value for value in grad], [1.0] * 3)
                    for number, grad in enumerate(grads, 1)] for factor in (1, 4))
    assert [(one.name, two.name) for one, two in match(left, right[::-1])] == [("1", "4"), ("2", "8")]
    noise = left[0]._replace(name="noise", grad=[1e-17 * value for value in grads[0]])
    pairs = match([noise, *left], [*right, noise._replace(name="other noise", grad=[1e-17, 0.0, 0.0])])
    assert [(one.name, two.name) for one, two in pairs] == [("noise", "other noise"), ("1", "4"), ("2", "8")]


def test_a_gradient_that_is_added_up_over_other_tensors_is_named():
    """As if ranks averaged the gradients of different experts."""
    one, two = (lambda grad, name=name, start=start: (name, [2], [start] * 3, grad, [1.0] * 3)
                for name, start in (("one", 1.0), ("two", 2.0)))
    b = made("B", [one([3.0, 2.0, 1.5])], [two([3.0, 2.0, 1.5])])
    report = compare_runs(made("A", [one([4.0, 1.0, 2.0]), two([4.0, 3.0, 1.0])]), b)
    assert report["cause"] == "unknown" and "equal gradients for different tensors, one and two" in report["message"]


@pytest.mark.parametrize("flat", [True, False])
def test_gradients_that_are_not_known_are_of_no_other_tensor(flat):
    states = [{"rows": [Row(name, [2], [start] * 3, [0.1], UNKNOWN, [1.0] * 3)]}
              for name, start in (("v", 1), ("w", 2))]
    side = SimpleNamespace(states=states, run=SimpleNamespace(ranks={0: 0, 1: 0}), label="B")
    assert bool(mixed(SimpleNamespace(flat=flat, sides=[side]))) != flat


@pytest.mark.parametrize(("values", "said"), [((1.0, 2.0), "; A has never changed 1 of 2, such as w"), ((1.0, 1.0), ""),
                                              ((2.0, 1.0), "; B has never changed 1 of 2, such as w")])
def test_a_parameter_that_only_one_run_has_never_changed_is_named(values, said):
    pairs = [[Row(name, [2], [1.0] * 3, [0.1], [1.0] * 3, [value] * 3) for value in found]
             for name, found in (("v", (2.0, 2.0)), ("w", values))]
    assert unchanged(SimpleNamespace(pairs=pairs)) == said


def test_two_parameters_that_look_alike_are_two():
    rows = [("parameter", [2], [0.0] * 3, [size] * 3, [size] * 3) for size in (1.0, 7.0)]
    assert len(made("A", rows, rows).at(0)[1]) == 2


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


def test_noise_is_no_part_of_a_gradient():
    """Before BatchNorm, the gradient of a bias is noise; those of two ranks add up to that of one, to within zero."""
    def rows(weight, bias):
        return [(name, [2], [1.0] * 3, [size] * 3, [1.0] * 3) for name, size in (("weight", weight), ("bias", bias))]

    whole, parts = made("A", rows(1.0, 1e-17)), made("B", rows(1.0, 3e-17), rows(2.0, 8e-17))
    assert not parts_of(parts.at(0)[0], whole.at(0)[1])
    halves = made("B", rows(0.4, 3e-17), rows(0.6, 8e-17))
    assert parts_of(halves.at(0)[0], whole.at(0)[1])


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


def test_inputs_that_are_integers_are_recorded_apart():
    modules, layer = Modules(), torch.nn.Embedding(4, 2)
    modules.names[id(layer)] = "layer"
    modules.passes("input", layer, (torch.tensor([1, 3]), torch.ones(2, 3), torch.tensor(0.5)), True)
    modules.weights(layer)
    assert [row[0] for row in modules.passed] == ["input", "input (integers)", "weights"]
    assert {row[1] for row in modules.passed} == {"layer"} and modules.passed[0][4] == 6  # without the scalar
    assert modules.passed[-1][5:] == digest([layer.weight])[0][:2]


def test_outputs_of_several_widths_are_recorded_apart():
    """If ranks split the last axis of one of them, it is not compared; an empty one says nothing."""
    modules, layer = Modules(), torch.nn.Linear(2, 2)
    modules.names[id(layer)] = "layer"
    modules.passes("output", layer, (torch.ones(2, 4, 3), torch.ones(2, 4), torch.ones(2, 0)), True)
    assert [row[3:5] for row in modules.passed] == [[3, 24], [4, 8]]


def test_an_infinite_mask_is_equal_to_itself():
    mask, passed = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf), []
    for _ in range(2):
        modules, layer = Modules(), torch.nn.Linear(1, 1)
        modules.names[id(layer)] = "layer"
        modules.passes("input", layer, mask, False)
        passed += modules.passed
    assert equal(passed[0][4:], passed[1][4:])


def test_both_parts_of_complex_numbers_are_recorded():
    """In parameters, samples, inputs of modules and buffers; torch would drop the imaginary part with a warning."""
    found = []
    for value in (torch.tensor([[1 + 2j, 3 - 1j], [2j, 0]]), torch.tensor([[1 - 2j, 3 + 1j], [-2j, 0]])):
        modules, layer = Modules(), torch.nn.Linear(2, 2, dtype=torch.cfloat)
        layer.register_buffer("phase", value)
        modules.find([*layer.parameters()], {*map(id, layer.parameters())})
        modules.passes("input", layer, value, True)
        assert widened(value).dtype == torch.complex128
        found += [[*digest([value])[0], *described(0, [value])[2], modules.passed[0][-1],
                   digest([item for _, item in modules.unoptimized])[0]]]
        del layer
    assert not any(one == other for one, other in list(zip(*found))[1:])


@pytest.mark.parametrize(("rows", "ignored", "tokens"), [
    ([[5, 6, 2, 2], [3, 2, 2, 2], [7, 8, 9, 4]], -100, (12, 7)), ([[1, 5, 6, 6], [6, 2, 6, 4]], -100, (8, 8)),
    ([[0, 0, 5, 6], [0, 2, 3, 4]], -100, (8, 5)), ([[5, 0, 6, 1], [0, 2, 3, 4]], -100, (8, 8)),
    ([[5, 6], [3, 4]], 3, (3, 4)),
    ([[1, 1, 0], [1, 1, 1], [0, 0, 0]], -100, (9, 5)), ([[5, 6, 0], [3, 0, 0]], -100, (6, 3)),
    ([[0, 4, 6], [1, 3, 7]], -100, (6, 6))])
def test_counts_leave_out_padding_and_ignored_labels(rows, ignored, tokens):
    assert tuple(counts_of([torch.tensor(rows)], ignored)[0][1:3]) == tokens


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


def test_a_step_has_what_each_of_its_optimizers_has():
    names = "before", "after", "clips", "flags", "stale"
    events = [{"event": kind, "rows": [], **{name: [number] for name in names}} for number, kind in enumerate((
        "step", "joined", "joined", "step"))]
    first, second = steps_of(events)
    assert [first[name] for name in names] == [[0, 1, 2]] * 5 and [second[name] for name in names] == [[3]] * 5
    assert load({"states": ["a"], "joined": [{"states": ["b"]}, {"states": ["c"]}]})["states"] == ["a", "b", "c"]


def test_rows_that_do_not_fit_their_table_are_not_cut(tmp_path):
    file = tmp_path / "0-1.jsonl"
    file.write_text('{"event": "rows", "rows": [[[0.1], [1], [1], 2, 0, null], [[0.1], [1], [1], 2, 0, null]]}\n')
    state = {"file": file, "place": 0, "table": [["w", [1], [1], None]], "options": [{}]}
    with pytest.raises(ValueError, match="longer"):
        load(state)


def test_complex_batches_and_ignored_labels_are_recorded(records):
    """In float64, a batch of complex64 would end the program. The criterion ignores two of four labels."""
    run = Run.read(records / "complex", "A")
    assert "torch.complex128" in run.flags and "torch.complex64" not in run.flags  # the weights
    assert run.kinds(0)[-1] == "end" and run.length == 3
    assert run.states(0)[0]["counts"][0][:8] == [4, 2, 4, 2.0, *[6.0] * 4]  # the weights of the labels, too
    assert [name for name, _ in run.states(0)[0]["weights"]] == ["weight of cross_entropy"]
    assert load(run.states(0)[0])["sites"][0][1] == 2 * 12 * 3  # both parts of each number drawn


def test_samples_that_every_rank_reads_count_once():
    """In tensor and pipeline parallelism, the batches have the same size, and something else differs."""
    a, b = (made(label, *[[("weight", [2], [0.0] * 3, [1.0, projection, 0.5], [0.0] * 3)]] * ranks)
            for label, ranks, projection in (("A", 1, 0.7), ("B", 2, 0.2)))
    difference = Difference(a, b, 0, "grad", match(a.at(0)[1], b.at(0)[1]))
    assert difference.a.samples == difference.b.samples == [1.0, 2.0]


def test_two_processes_that_are_both_rank_0_are_not_comparable(records, tmp_path):
    """Their steps must not be treated as steps of one rank."""
    for number in ("1", "2"):
        (tmp_path / f"0-{number}.jsonl").write_text(next((records / "right on 1").glob("*.jsonl")).read_text())
    report = verify.compare(records / "right on 1", tmp_path)
    assert report["verdict"] == "not comparable" and "command B restarted" in report["message"]


@pytest.mark.parametrize(("shuffled", "loader", "said"), [
    (True, 0, ("set-epoch", "rank 0 reads the same order in epochs 1 and 2", None)), (False, 0, None),
    (True, 1, ("set-epoch", "rank 0 reads the same order of loader 2 in epochs 1 and 2", None))])
def test_only_an_order_that_is_shuffled_must_change(shuffled, loader, said):
    batches = [[number, [], [1.0, 2.0, 3.0], [], []] for number in range(loader + 1)]
    epoch = [{"event": "step", "rows": [], "batches": batches, "flags": []},
             {"event": "epoch", "shuffled": shuffled, "loader": loader}]
    assert new_order(Run("the run", [(0, 2 * epoch)]), None) == said


def test_points_whose_gradients_the_loss_needs_are_samples_but_not_what_a_stage_receives(records):
    one, two = (Run.read(records / f"rows by hand, points on {world}", "run") for world in (1, 2))
    assert len(one.samples(0)) == 8 and equal(one.samples(0), two.samples(0))
    steps = [{"event": "step", "batches": [[LEAVES, [], [1.0], [], []]], "flags": [], "table": [name]} for name in "ab"]
    run = Run("the run", [*enumerate([step] for step in steps)])
    assert not run.samples(0)


@pytest.mark.parametrize(("name", "cause"), [("parameter", "samples"), ("w", None)])
def test_without_modules_ranks_with_equal_weights_must_read_other_samples(name, cause):
    """With modules whose inputs were not seen, they may have parts of a sequence."""
    found = one_share(made("the run", *[[(name, [2], [1.0] * 3)]] * 2), None)
    assert (found and found[0]) == cause


@pytest.mark.parametrize(("first", "later", "cause"), [(0.1, 0.1, None), (0.1, 0.2, "rank-lr"), (0.2, 0.2, None)])
def test_stages_with_equal_rates_at_first_must_have_equal_rates_later(first, later, cause):
    run = made("the run", [("one", [2])], [("two", [2])])
    for rank, steps in run.ranks.items():
        name, shape, start, _, *more = steps[0]["rows"][0]
        steps[:] = [steps[0] | {"optimizer": 0, "rows": [[name, shape, start, [rate if rank else 0.1], *more]]}
                    for rate in (first, later)]
    run.length = 2
    assert (rates(run, None) or (None, 0))[0] == cause


def test_copies_of_the_model_must_start_equal_on_all_ranks():
    """Such as the target network of a critic that is copied before DDP sends the weights of rank 0."""
    run = made("the run", [("w", [2], [1.0] * 3)], [("w", [2], [1.0] * 3)])
    for rank, state in enumerate(run.states(0)):
        state["unoptimized"] = [["average of w", [2], [1.0 + rank] * 3]]
    said = replicas(run, LIMITS["own"])[1]
    assert "copies of the model differ, such as average of w; copy the model after its weights are equal" in said


@pytest.mark.parametrize(("earlier", "cause"), [([], "start"), ([["average of w", [2], [1.0] * 3]], None)])
def test_copies_are_compared_when_their_optimizer_first_steps(earlier, cause):
    """As those of a generator, after the critic's steps; later, only rank 0 may update them."""
    run = made("the run", [("w", [2], [1.0] * 3)], [("w", [2], [1.0] * 3)])
    for rank, steps in run.ranks.items():
        late = {"optimizer": 1, "unoptimized": [["average of w", [2], [1.0 + rank] * 3]]}
        steps[:] = [steps[0] | {"optimizer": 0, "unoptimized": earlier}, steps[0] | late]
    run.length = 2
    found = replicas(run, LIMITS["own"])
    assert found == (cause and (cause, found[1], 2)), found


@pytest.mark.parametrize(("grads", "cause"), [((1.0, 1.0), "start"), ((1.0, 2.0), None), ((0.0, 0.0), None)])
def test_equal_gradients_show_that_weights_which_start_apart_are_replicas(grads, cause):
    """Without DDP, other weights may be parts of a tensor, whose gradients differ, or are all zero."""
    ranks = [[("w", [2], [1.0] * 3, [1.0] * 3, [1.0] * 3), ("v", [2], [start] * 3, [size] * 3, [1.0] * 3)]
             for start, size in zip((1.0, 2.0), grads)]
    assert (replicas(made("the run", *ranks), LIMITS["own"]) or (None,))[0] == cause


def test_a_loader_that_is_created_anew_is_known_by_its_dataset():
    samples, iterators = Samples(None), []
    for name, dataset, active in (("one", [1], 0), ("two", [2], 0), ("one again", [1], 1), ("beside it", [1], 0)):
        dataset = next((one._dataset for one, _ in iterators if one._dataset == dataset), dataset)
        iterators.append((SimpleNamespace(_index_sampler=[name], _dataset=dataset), active))
        loader = samples.loader(iterators[-1][0])
        loader.iterator = (lambda: True) if active else None
        iterators[-1] = iterators[-1][0], loader.number
    assert [number for _, number in iterators] == [0, 1, 0, 2]


def test_a_state_that_a_model_returns_and_takes_again_is_no_sample():
    samples, state = Samples(None), torch.zeros(2, 3)
    for _ in range(3):
        x, before, state = torch.ones(2, 4), state, torch.ones(2, 3)
        samples.follow([x, before.detach()], [torch.ones(2, 5), state])
        samples.carry([torch.ones(2, 5), state])
        assert samples.calls[-1].inputs[0] is x and samples.carries(state.detach()) and not samples.carries(x)
    assert [len(call.inputs) for call in samples.calls] == [2, 1, 1]


def test_a_state_that_the_last_call_has_returned_is_named_as_the_origin_of_an_input():
    recorder = SimpleNamespace(depth=0, native=True, resting=(), optimized=set(), shows=lambda: True, draws=Draws(),
                               samples=Samples(None), modules=Modules())
    recorder.origin = functools.partial(Recorder.origin, recorder)
    layer, found = torch.nn.RNN(4, 3), []
    _, state = Recorder.call(recorder, torch.nn.RNN.forward, layer, torch.ones(2, 4))
    for given in (torch.zeros(1, 3), state.detach()):
        recorder.modules.computed = {}
        _, state = Recorder.call(recorder, torch.nn.RNN.forward, layer, torch.ones(2, 4), given)
        found += [[*recorder.modules.computed.values()]]
    assert found == [[], []], "the state of the call before the last one"
    Recorder.call(recorder, torch.nn.RNN.forward, layer, torch.ones(2, 4), state.detach())
    assert recorder.modules.computed == {"RNN": "a part of which the last call has returned, such as a state"}


def test_a_frozen_network_in_evaluation_mode_is_recorded_with_its_weights():
    recorder = SimpleNamespace(depth=0, native=True, resting=(), optimized=set(), shows=lambda: True, draws=Draws(),
                               samples=Samples(None), modules=Modules(), origin=lambda tensors: "")
    frozen, found = torch.nn.Linear(4, 3).eval().requires_grad_(False), []
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context:
            Recorder.call(recorder, torch.nn.Linear.forward, frozen, torch.ones(2, 4))
        found.append([row[0] for row in recorder.modules.passed])
        recorder.modules.passed = []
    assert found == [["input", FROZEN, "output"], ["no_grad input", FROZEN, "no_grad output"]]
    recorder.modules.weights(frozen.requires_grad_(), "no_grad ")
    assert not recorder.modules.passed


@pytest.mark.parametrize(("before", "step", "ours", "cause", "said"), [
    ("loss", 0, [2.0, 3.0], "start", "differ between rank 0 of A and rank 0 of B"),
    ("loss", 0, [1.0, 3.0], "start", "rank 1 of B"), ("loss", 1, [2.0, 2.0], "buffers", "rank 0 of B"),
    ("loss", 0, [1.0, 1.0], "loss", "evidence"), ("not-averaged", 0, [2.0, 3.0], "not-averaged", "evidence"),
    ("loss", 0, [7.0, 7.0], "loss", "evidence")])  # A has these weights: the name is of another stage
def test_frozen_weights_that_differ_are_named(before, step, ours, cause, said):
    values = [{"passed": [[FROZEN, "net", False, 0, 8, size, size]]} for size in (1.0, *ours)]
    values[0]["passed"].append([FROZEN, "other", False, 0, 8, 7.0, 7.0])
    values[1]["passed"] += [[FROZEN, "net", False, 0, 8, 5.0, 5.0],  # a later call, after an update of an average
                            [FROZEN, "of B alone", False, 0, 8, 6.0, 6.0]]
    runs = differing(*values)
    runs = preceded(runs, [1.0, 2.0], [1.0], [2.0]) if step else runs
    found = trace({"step": step + 1, "cause": before, "message": "evidence"}, *runs)
    assert found["cause"] == cause and said in found["message"], found


@pytest.mark.parametrize("cut", [1, 2])
def test_frozen_modules_with_one_name_on_two_stages_are_not_compared(cut):
    values = [{"passed": [[FROZEN, "0", False, 0, 8, size, size], ["output", "0", False, 4, 8, size, size]][:3 - cut]}
              for size in (1.0, 1.0, 7.0)]
    a, b = differing(*values)
    b.cut = cut  # weights of split tensors may differ
    assert first_value(a, b, 0) is None


@pytest.mark.parametrize(("cut", "samples", "losses", "cause"), [
    (2, [1.0, 1.0], [0.8, 1.2], "loss"), (1, [1.0, 1.0], [0.8, 1.2], "no-backward"),
    (2, [1.0, 2.0], [0.8, 1.2], "no-backward"), (2, [1.0, 1.0], [1.0, 1.0], "no-backward"),
    (2, [], [0.8, 1.2], "no-backward")])  # the samples were not seen
def test_ranks_with_parts_of_tensors_have_equal_losses_for_equal_samples(cut, samples, losses, cause):
    a, b = differing(batch(*{*samples}), *[batch(*samples[rank:rank + 1]) | {"losses": [loss]}
                                           for rank, loss in enumerate(losses)])
    b.cut = cut
    report = compare_runs(a, b)
    assert report["cause"] == cause and report["message"].startswith("not sure: "), report


@pytest.mark.parametrize(("backwards", "joins", "reach"), [(0, False, REACHED), (0, True, UNREACHED),
                                                           (1, False, UNREACHED)])
def test_a_gradient_that_a_program_sets_without_backward_counts_as_reached(backwards, joins, reach):
    """An optimizer that joins another one steps after the same backward pass."""
    one, two = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    one.grad = torch.ones(2)
    recorder = SimpleNamespace(parameters=[one, two], backwards=backwards, joins=joins, hooked={id(one): one},
                               reached=set())
    assert Recorder.reaches(recorder) == [reach, MISSING]


def test_gradients_that_are_taken_for_parameters_are_added_up_and_an_iterator_is_not_used_up():
    w, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    recorder = SimpleNamespace(hooked={id(w): w}, graphs=0, taken=([], [], {}), shows=lambda: True, flags=set(),
                               counted=[], modules=Modules(), loss=None)
    recorder.note_losses = functools.partial(Recorder.note_losses, recorder)
    for factor in (1, 2):
        found = Recorder.grad(recorder, torch.autograd.grad, (factor * w * b).sum(), iter([w, b]))
        assert len(found) == 2
    losses, _, gradients = recorder.taken
    assert [*map(float, losses)] == [2.0, 4.0] and [gradients[id(item)].tolist() for item in (w, b)] == [[3.0, 3.0]] * 2
    Recorder.grad(recorder, torch.autograd.grad, (w * b).sum(), b)
    assert len(losses) == 2, "b is no parameter of an optimizer"


def test_the_targets_of_all_losses_are_counted_whose_second_argument_they_are():
    known = {name for name, function in vars(torch.nn.functional).items() if hasattr(function, "__code__")
             and function.__code__.co_varnames[1:2] in (("target",), ("targets",)) and "reduction" in (
                 function.__code__.co_varnames[:function.__code__.co_argcount])}
    of_margins = {"hinge_embedding_loss", "multi_margin_loss", "multilabel_margin_loss",
                  "multilabel_soft_margin_loss"}  # these are rare
    assert known - of_margins <= {*CRITERIA}


def test_the_rows_that_vmap_maps_over_are_samples():
    seen, x = [], torch.arange(12.0).reshape(3, 4)
    gradient = torch.func.grad(lambda row: (seen.extend(tensors_of([row])), row.sum())[1])
    torch.func.vmap(gradient, 1)(x)
    assert seen[0].equal(x.T)


def test_only_the_loaders_that_differ_are_compared():
    a, b = differing({"batches": batch(1.0, 2.0)["batches"] + batch(3.0, loader=1)["batches"]},
                     {"batches": batch(1.0, 2.0)["batches"] + batch(4.0, loader=1)["batches"]})
    a.at(0)
    assert "0 of the step's 1 samples of loader 2 of 2" in compare_runs(a, b)["message"]
    assert a.at(0)[2] == [3.0] and b.at(0)[2] == [4.0]
    a, b = differing({"batches": batch(1.0, 2.0)["batches"] + batch(3.0, loader=1)["batches"]}, batch(1.0, 2.0))
    report = compare_runs(a, b)
    assert report["cause"] == "batch-size" and "3 samples in A, 2 in B" in report["message"]


def test_what_a_backward_pass_computes_and_indices_that_are_numbers_are_recorded(records):
    state = Run.read(records / "penalty on 1", "A").states(1)[0]
    assert (state["graphs"], len(state["labels"])) == (1, 8)  # for each of two micro-batches of 4 samples
    assert described(0, [torch.ones(3, 2)], ["name", ("pair", 1), 7, numpy.int64(8)])[4] == [7, 8]


def test_replicas_may_start_at_zero():
    run = made("the run", [("w", [2])], [("w", [2])])
    for state in run.states(0):
        state["replicas"] = True
    assert replicas(run, LIMITS["own"]) is None


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
