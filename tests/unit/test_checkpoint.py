"""Checkpoints and the output folder: the settings of a resumed run, and file systems that do not support locks."""
import argparse
import errno
import functools
import math
import os
import socket
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from conftest import ROOT, same

from common import checkpoint, models, recipe, updates
from common.errors import ProcessError, UsageError
from detection import yolov3


def make(lr=0.05, momentum=0.9, weight_decay=1e-4, epochs=10, schedule=None):
    """Return a model, its optimizer and its scheduler as a script makes them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(models.parameter_groups(model, weight_decay), lr, momentum)
    scheduler = schedule(optimizer) if schedule else torch.optim.lr_scheduler.LambdaLR(
        optimizer, recipe.cosine(epochs, 0.01))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state, epochs):
    """Train for some epochs of one step each; return their learning rates."""
    rates = []
    for _ in range(epochs):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()
        rates.append([group["lr"] for group in state["optimizer"].param_groups])
        state["scheduler"].step()
    return rates


def save(path, state, epoch):
    checkpoint.save_checkpoint(path, checkpoint.collect(state, epoch=epoch, score=0.5, best_score=0.5))
    return path


@pytest.mark.parametrize("schedule", [
    None, functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=6),
    functools.partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=4)],
    ids=["cosine", "one cycle", "cycles"])  # the last two also change the momentum
def test_the_same_command_resumes_bit_for_bit(tmp_path, capsys, schedule):
    whole = make(schedule=schedule)
    rates = train(whole, 6)
    half = make(schedule=schedule)
    train(half, 3)
    again = make(schedule=schedule)
    assert checkpoint.resume(save(tmp_path / "half.pt", half, 3), tmp_path, again) == (4, 0.5)
    assert "changes" not in capsys.readouterr().out
    assert train(again, 3) == rates[3:]
    for left, right in zip(whole["model"].parameters(), again["model"].parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_command_line_wins(tmp_path, capsys):
    """The rate, momentum and weight decay come from the new command, and later rates from its schedule."""
    old = make()
    train(old, 3)
    path = save(tmp_path / "old.pt", old, 3)
    new = make(lr=0.2, momentum=0.5, weight_decay=0.1, epochs=20)
    checkpoint.resume(path, tmp_path, new)
    said = capsys.readouterr().out.splitlines()
    rates = train(make(lr=0.2, epochs=20), 6)[3:]
    assert said[1] == (f"resume {path}: this command changes lr from {0.05 * recipe.cosine(10, 0.01)(3):g} to "
                       f"{rates[0][0]:g}, momentum from 0.9 to 0.5, weight_decay from 0.0001 to 0.1")
    assert [(group["momentum"], group["weight_decay"]) for group in new["optimizer"].param_groups] == [(0.5, 0.1),
                                                                                                       (0.5, 0.0)]
    assert train(new, 3) == rates


def test_what_a_checkpoint_lacks_is_named(tmp_path, capsys):
    """A disabled scaler has no state that the checkpoint could lack."""
    path, new = save(tmp_path / "old.pt", make(), 3), make()
    new["scaler"] = torch.amp.GradScaler("cpu", enabled=False)
    new["warmup"] = updates.WarmUp(new["optimizer"], 5)
    checkpoint.resume(path, tmp_path, new)
    assert capsys.readouterr().out.splitlines() == [
        f"resume {path}: epoch 3 is done, best score 0.5000",
        f"resume {path}: not in the checkpoint, so initialized by this run: warmup"]


NAMED = {"classifier": lambda classes: models.create_model("cnn", classes, (1, 28, 28)),
         "detector": lambda classes: yolov3.create_model("tiny", classes, torch.ones(9, 2))}


@pytest.mark.parametrize("create", NAMED.values(), ids=NAMED)
def test_a_class_is_a_name(tmp_path, capsys, create):
    """A checkpoint of other classes is refused, though all shapes fit; its weights are loaded with a line."""
    old = make() | {"model": create(["cat", "dog"])}
    path = save(tmp_path / "old.pt", old, 1)
    assert torch.load(path)["classes"] == ["cat", "dog"]
    for classes, said in ((["dog", "kitten"], r"its class 0 is 'cat' \(of 2\), this run's is 'dog' \(of 2\)"),
                          (["cat", "dog", "owl"], r"its class 2 is None \(of 2\), this run's is 'owl' \(of 3\)")):
        with pytest.raises(UsageError, match=f"--resume {path}: {said}; use the same classes, or .* --weights$"):
            checkpoint.resume(path, tmp_path, make() | {"model": create(classes)})
    models.load_weights(create(["dog", "cat"]), path)
    assert "; its class 0 is 'cat' (of 2), this run's is 'dog' (of 2)" in capsys.readouterr().out
    for classes in (["cat", "dog"], 2):  # a data set without names is any
        model = create(classes)
        models.load_weights(model, path)
        assert "its class" not in capsys.readouterr().out
        assert checkpoint.other_classes(torch.load(path), model) == ""
    assert "classes" not in checkpoint.collect({"model": create(2)})


def test_a_scheduler_of_ones_own_is_scaled(tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    old = make(lr=0.1, schedule=schedule)
    train(old, 3)
    new = make(lr=0.4, schedule=schedule)
    checkpoint.resume(save(tmp_path / "old.pt", old, 3), tmp_path, new)
    assert [rate[0] for rate in train(new, 3)] == pytest.approx([0.2, 0.1, 0.1])


def test_a_scheduler_that_looks_at_the_loss_is_resumed_with_the_rate_of_the_command(tmp_path, capsys):
    """Unlike others, this scheduler does not record the first rate in the optimizer."""
    def make_plateau(lr):
        plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
        state = make(lr=lr, schedule=plateau)
        return state, checkpoint.resume(None, tmp_path, state)

    old, start = make_plateau(0.1)
    assert start == (1, -math.inf)  # any score is higher
    for _ in range(2):
        old["optimizer"].step()
        old["scheduler"].step(1.0)
    new, _ = make_plateau(0.4)
    checkpoint.resume(save(tmp_path / "old.pt", old, 2), tmp_path, new)
    assert [group["lr"] for group in new["optimizer"].param_groups] == pytest.approx([0.04] * 2)
    assert "changes lr from 0.01 to 0.04" in capsys.readouterr().out and new["scheduler"].best == 1.0


def test_what_is_resumed_does_not_lean_on_the_file(tmp_path):
    """The file is mapped, and what stays in use is a copy: pages of a file that another host replaces may be lost."""
    old = make()
    train(old, 1)
    path = save(tmp_path / "old.pt", old, 1)
    mapped, new = checkpoint.load_file("--resume", path), make()
    checkpoint.resume(path, tmp_path, new)
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert not mapped["model"]["weight"].any()
    kept = [one["momentum_buffer"] for one in new["optimizer"].state.values()]
    assert len(kept) == 2 and all(tensor.any() for tensor in [*kept, *new["model"].parameters()])


def test_a_checkpoint_is_on_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """The name is also on disk when the call returns: a power failure leaves the old file or the new one."""
    calls, real = [], {"fsync": checkpoint.os.fsync, "replace": checkpoint.os.replace}

    def fsync(number):
        size = checkpoint.os.fstat(number).st_size
        calls.append("folder" if stat.S_ISDIR(checkpoint.os.fstat(number).st_mode) else size)
        real["fsync"](number)

    monkeypatch.setattr(checkpoint.os, "fsync", fsync)
    monkeypatch.setattr(checkpoint.os, "replace", lambda *paths: (calls.append("rename"), real["replace"](*paths)))
    path = save(tmp_path / "last.pt", make(), 1)
    assert calls == [path.stat().st_size, "rename", *["folder"] * (sys.platform != "win32")]


def test_names_are_copies_where_there_are_no_links(tmp_path, monkeypatch):
    """A file from a killed run already has the name."""
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(checkpoint.os, "link", refuse)
    (tmp_path / ".last.pt.link").write_bytes(b"torn")
    checkpoint.save_checkpoint(tmp_path / "last.pt", {"epoch": 1}, ["best.pt", "epoch-001.pt"])
    assert {path.name for path in tmp_path.iterdir()} == {"best.pt", "epoch-001.pt", "last.pt"}
    assert all(torch.load(path, weights_only=True) == {"epoch": 1} for path in tmp_path.iterdir())


def test_a_snapshot_has_the_weights_of_its_call_and_training_goes_on(tmp_path):
    """The write waits until the weights have changed. Python lists and numbers are copied, too."""
    state, writer, go_on = make(), checkpoint.BackgroundWriter(), threading.Event()
    train(state, 1)
    writer.pool.submit(go_on.wait)
    expected = checkpoint.copied(checkpoint.collect(state))
    writer.save(tmp_path / "last.pt", checkpoint.collect(state, epoch=1))
    train(state, 1)
    go_on.set()
    writer.wait()
    found = torch.load(tmp_path / "last.pt", weights_only=True)
    assert found.pop("epoch") == 1 and same(found, expected)


def test_a_snapshot_that_cannot_be_written_is_an_error_of_the_next_wait(tmp_path):
    writer = checkpoint.BackgroundWriter()
    (tmp_path / "last.pt").mkdir()
    writer.save(tmp_path / "last.pt", {})
    with pytest.raises(ProcessError, match="cannot save"):
        writer.wait()
    with pytest.raises(ProcessError, match="cannot save"):
        writer.save(tmp_path / "other.pt", {})


def test_processes_that_found_different_checkpoints_do_not_start(tmp_path, monkeypatch):
    """tests/test_endings.py tests `agree` itself, on two processes."""
    asked = []
    monkeypatch.setattr(checkpoint, "agree", asked.append)
    with pytest.raises(checkpoint.UsageError, match="--resume: the processes found different checkpoints"):
        checkpoint.resume("auto", tmp_path, make(), {"step": 0})
    assert asked == [((1, -math.inf), {"step": 0})]


def test_the_lock_names_its_holder_alone(tmp_path):
    pytest.importorskip("fcntl")
    (tmp_path / ".lock").write_text("elsewhere 4711, which has ended\n")
    checkpoint.make_folder(tmp_path)
    host, process, kernel = (tmp_path / ".lock").read_text().splitlines()[0].split()
    assert (host, int(process), kernel) == (socket.gethostname(), os.getpid(), checkpoint._kernel())


@pytest.mark.parametrize(("of_this_machine", "seconds"), [(True, 60), (False, -1)])
def test_a_lock_is_not_waited_for_without_end(tmp_path, monkeypatch, capsys, of_this_machine, seconds):
    """If a lock is from this boot of this machine, its process is alive, so the run does not wait at all."""
    monkeypatch.setattr(checkpoint, "LOCK_SECONDS", seconds)
    holder = hold(tmp_path, f"elsewhere 4711 {checkpoint._kernel() if of_this_machine else 'another-kernel'}\n")
    with pytest.raises(checkpoint.UsageError, match=f"--output-dir {tmp_path}: in use by another run .*elsewhere 4711"):
        checkpoint.make_folder(tmp_path)
    assert "waiting" not in capsys.readouterr().err
    holder.communicate("")


ONE_OF_TWO = """if True:
    import sys
    import torch.distributed as dist
    from common import checkpoint
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), world_size=2)
    try:
        checkpoint.make_folder(sys.argv[1])
    except checkpoint.UsageError as error:
        print(error)"""


def test_every_process_finds_that_the_folder_is_in_use(tmp_path):
    """Only the main process tries to lock it; the others would otherwise wait for a process that has ended."""
    holder = hold(tmp_path, f"elsewhere 4711 {checkpoint._kernel()}\n")
    runs = [subprocess.Popen([sys.executable, "-c", ONE_OF_TWO, tmp_path, str(rank)], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE) for rank in (0, 1)]
    first, second = (run.communicate(timeout=60)[0] for run in runs)
    holder.communicate("")
    assert "in use by another run" in first and second == f"--output-dir {tmp_path}: another process cannot use it\n"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of_and_used(tmp_path, monkeypatch, capsys, number):
    def refuse(*_):
        raise OSError(number, "No locks available")

    monkeypatch.setattr(pytest.importorskip("fcntl"), "lockf", refuse)
    assert checkpoint.make_folder(tmp_path) == tmp_path
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"--output-dir {tmp_path}: " in said and "no locks" in said


HOLD = """if True:
    import fcntl, sys
    file = open(sys.argv[1], "a+")
    fcntl.lockf(file, fcntl.LOCK_EX)
    file.truncate(0), file.write(sys.argv[2]), file.flush()
    print("held", flush=True), sys.stdin.read()"""


def hold(folder, holder):
    """Return a process that holds the folder's lock, as a process that says it is `holder`, until its input ends."""
    pytest.importorskip("fcntl")  # Windows has none
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder / ".lock", holder],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


TAKE = "from common import checkpoint; import sys; checkpoint.make_folder(sys.argv[1]); print('taken', flush=True)"


def test_a_lock_of_another_host_is_waited_for(tmp_path):
    """A crashed host's lock remains until its lease ends. A start that waits for it does not use up a restart."""
    holder = hold(tmp_path, "elsewhere 4711 another-kernel\n")
    run = subprocess.Popen([sys.executable, "-c", TAKE, tmp_path], cwd=ROOT, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True)
    said = run.stderr.readline()
    assert "elsewhere 4711" in said and f"waiting up to {checkpoint.LOCK_SECONDS} s" in said
    holder.communicate("")
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (0, "taken\n", "")


def test_a_name_that_cannot_be_given_leaves_the_last_checkpoint(tmp_path):
    """last.pt is written last, because it marks the epoch as done."""
    checkpoint.save_checkpoint(tmp_path / "last.pt", {"epoch": 1})
    (tmp_path / "best.pt/full").mkdir(parents=True)
    with pytest.raises(ProcessError, match="earlier checkpoints are intact"):
        checkpoint.save_checkpoint(tmp_path / "last.pt", {"epoch": 2}, ["best.pt"])
    assert torch.load(tmp_path / "last.pt") == {"epoch": 1}


@pytest.mark.parametrize("sums", [True, False])
def test_a_damaged_tensor_is_found_if_the_file_has_checksums(tmp_path, sums):
    """torch writes checksums by default, but compares none (pytorch issue 126952)."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(sums)
    torch.save({"weight": torch.zeros(10_000)}, tmp_path / "some.pt")
    torch.serialization.set_crc32_options(before)
    assert not checkpoint.load_file("--weights", tmp_path / "some.pt")["weight"].any()
    content = bytearray((tmp_path / "some.pt").read_bytes())
    content[len(content) // 2] = 1
    (tmp_path / "some.pt").write_bytes(content)
    if not sums:
        assert checkpoint.load_file("--weights", tmp_path / "some.pt")["weight"].any()
        return
    with pytest.raises(UsageError, match="some.pt: incomplete, damaged or not from torch.save$"):
        checkpoint.load_file("--weights", tmp_path / "some.pt")


@pytest.mark.parametrize(("content", "said"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n", "incomplete, damaged or not from"),
    (b"<!DOCTYPE html>", "incomplete, damaged or not from"),
    (b"\x40\0\0\0\0\0\0\0{}", "incomplete, damaged or not from"),
    ({"args": argparse.Namespace(lr=1)}, "rejected: .* it contains argparse.Namespace$"),
    ({"best": np.float64(0.5)}, r"rejected: .* it contains numpy\._?core\.multiarray\.scalar$")])
def test_what_is_no_checkpoint_and_what_it_may_not_contain_are_named(tmp_path, content, said):
    """A pointer of Git LFS, a web page and a file of safetensors; arguments and numbers of numpy."""
    if isinstance(content, bytes):
        (tmp_path / "some.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "some.pt")
    with pytest.raises(UsageError, match=f"^--weights .*some.pt: {said}"):
        checkpoint.load_file("--weights", tmp_path / "some.pt")
