"""The ranked search leads from what people ask to the section that answers it; symptoms.txt itself is not searched."""
import collections
import os
import subprocess
import sys

import pytest
import search
from conftest import ROOT
from test_symptoms import SYMPTOMS, within_two_pages

SECTIONS = search.read()
WEIGHTS = search.weigh(SECTIONS)


def leads_to(target, text):
    """Return whether one of the first five results leads to the section or, if the target is a page, into the page."""
    found = [there for section in search.search(SECTIONS, WEIGHTS, text) for _, there in section.targets]
    return target in found or target in {there.partition("#")[0] for there in found}


@pytest.mark.parametrize(("chinese", "least"), [(False, 0.93), (True, 0.95)])
def test_the_first_five_results_contain_the_answer(chinese, least):
    asked = [(text, target) for text, target in SYMPTOMS if chinese != text.isascii()]
    missed = [text for text, target in asked if not leads_to(target, text)]
    assert len(missed) <= (1 - least) * len(asked), missed


@pytest.mark.parametrize(("text", "target"), [
    ("my training gets slower with more GPUs", "docs/pitfalls/README.md#it-is-slow"),
    ("freezing at the beginning, no errors shown", "docs/hangs.md#it-hangs-before-the-first-step"),
    ("FAILED (EXITCODE: -11) LOCAL_RANK: 0", "docs/errors.md#launchers-and-slurm"),
    ("Resume training from a checkpoint", "docs/pitfalls/saving.md#e8-only-the-weights-are-saved"),
    ("resume checkpoint using deepspeed while changing the number of gpus", "docs/errors.md#data-and-checkpoints"),
    ("Early stopping with ddp bug", "docs/pitfalls/step.md#p14-only-rank-0-stops-early"),
    ("findUnusedParameters", "docs/pitfalls/step.md#p9-ddp-searches-for-unused-parameters-in-every-step"),
    ("两张显卡，训练速度反而更慢", "docs/pitfalls/README.md#it-is-slow"),
    ("training hangs after one sub-epoch", "docs/pitfalls/README.md#it-hangs-or-fails-at-the-end-of-an-epoch"),
    ("Can I use 2 GPUs?", "docs/your-own-loop.md#1-change-24-lines"),
    ("Multi-GPU training vs Distributed training", "docs/your-own-loop.md#coming-from-dataparallel"),
    ("Can not load checkpoint trained by multi-GPU", "docs/pitfalls/saving.md#e5-every-key-begins-with-module"),
    ("Multi GPU takes longer", "docs/pitfalls/README.md#it-is-slow"),
    ("Raise an error in validation with multi GPU training", "docs/pitfalls/README.md#it-hangs-in-validation"),
    ("how to train on a gpu other than gpu 0", "docs/pitfalls/README.md#other-gpus-than-the-chosen-ones-work"),
    ("multi-GPU decoding", "docs/your-own-loop.md#a-metric-that-is-not-a-sum"),
    ("distributed validate", "docs/pitfalls/data.md#d2-accuracy-depends-on-the-number-of-processes"),
])
def test_other_words_find_it_too(text, target):
    assert leads_to(target, text)


@pytest.mark.parametrize("words", ["GPU GPUs", "loss losses", "stop stops stopped stopping", "batch batches",
                                   "copy copies", "cache caches cached", "process processes"])
def test_forms_of_a_word_are_one_term(words):
    assert len(set(search.terms(words))) == 1


def test_an_identifier_is_found_whole_and_in_parts():
    assert search.terms("the torch.nn.SyncBatchNorm -11 梯度累积") == [
        "torch.nn.syncbatchnorm", "torch", "nn", "sync", "batch", "norm", "-11", "梯度", "度累", "累积"]


def test_a_row_and_a_section_lead_to_their_places():
    rows = [section for section in SECTIONS if section.lines[0].startswith("exitcode  : -11")]
    assert [row.targets[0][1] for row in rows] == ["docs/errors.md#launchers-and-slurm"]
    lines = [line for section in SECTIONS for line in section.lines]
    assert not any("`" in line or "](" in line or not line for line in lines)
    assert not any(line.startswith("70B, 64 |") for line in lines)  # a row of measurements
    assert not any("import torch." in line for line in lines)  # a block of code


def test_each_item_of_a_long_section_is_found_alone():
    found = [section for section in SECTIONS if section.targets[0][1] == "docs/pitfalls/README.md#it-is-slow"]
    slow_rank = [section for section in found if any(line.startswith("One rank is slow") for line in section.lines)]
    assert len(found) > 10 and len(slow_rank) == 1 and slow_rank[0].terms.total() < 200


def test_a_paragraph_of_an_item_stays_with_it():
    words = " ".join(f"word{number}" for number in range(60))
    found = search._parts(f"1. {words}\n\n   {words}\n2. {words}\n\n{words}")
    assert [part.count("word59") for part in found] == [2, 1, 1]


def test_a_rare_term_weighs_more_than_a_common_one():
    sections = [search.Section([], [], collections.Counter(search.terms(text))) for text in ("hang nccl", "hang gloo")]
    weights = search.weigh(sections)
    assert weights["nccl"][0] > weights["hang"][0] == weights["hang"][1] > 0


def test_a_page_that_readers_reach_is_searched():
    reports = {"docs/gpus/README.md", "docs/gpus/1x-h100.md", "verify/audit.md", "CONTRIBUTING.md", "common/digits.md"}
    assert within_two_pages("README.md").difference(search.pages()) <= search.NOT_SEARCHED | reports


@pytest.mark.parametrize(("text", "code", "said"), [
    ("Watchdog caught collective operation timeout", 0, "docs/errors.md#collectives-and-nccl\n"),
    ("qwertz", 1, "search.py: no page has any of these words: qwertz\n"), ("", 2, search.__doc__ + "\n")])
def test_the_command(text, code, said):
    command = [sys.executable, "-m", "tools.search", *text.split()]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == code
    assert said in ran.stdout if code == 0 else ran.stderr == said


@pytest.mark.skipif(os.name == "nt", reason="a shell's pipe")
@pytest.mark.parametrize("command", ["-m tools.search nccl timeout", "tools/markers.py --plain train_DDP.py"])
def test_a_reader_may_close_the_pipe(command):
    ran = subprocess.run(f"{sys.executable} {command} | true", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == ran.stderr == ""


def test_a_question_finds_no_row_of_a_page_in_the_other_language():
    for text, other in (("loss nan with two GPUs", "zh"), ("DDP 训练 nan", "en")):
        found = search.search(SECTIONS, WEIGHTS, text, most=len(SECTIONS))
        assert {section.language for section in found} == {"", "zh", "en"} - {other}
