"""Run the scripts as a user does: with the real command, the real launcher and real processes.

To save time, `run` forks torchrun from a process that has imported torch: forked.py.
"""
import collections
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import markers
import pytest
from filelock import FileLock

import verify

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests/programs"
# All processes of all launches load torch faster
SITE = os.pathsep.join([str(PROGRAMS / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["PYTHONPATH"] = SITE
FROM_ROOT = {"PYTHONPATH": f"{ROOT}{os.pathsep}{SITE}"}  # for a program that imports what is in the repository
PYTHON = sys.executable
LAUNCH = [PYTHON, "-m", "torch.distributed.launch"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]


def float64(folder):
    """Return the environment in which a script computes in float64 and verify notes its steps in a folder.

    Two correct variants then differ by 1e-14 after a whole run. They use one thread, because two threads of one process
    wait for each other as soon as another test needs a core.
    """
    return {**verify.environment(folder), "OMP_NUM_THREADS": "1"}


# For a run whose steps no test compares: an eighth of its time is saved
FLOAT64 = {"PYTHONPATH": os.pathsep.join([str(PROGRAMS / "float64"), SITE]), "OMP_NUM_THREADS": "1"}

# The scripts that train train.py's model; those of the wings: test_language.py, test_detection.py
SCRIPTS = [path.name for path in markers.scripts() if path.parent == ROOT and path.name.startswith("train")]
# What a script needs to show its idea in a short run; a script that is not listed needs nothing
OPTIONS = {"train_amp.py": ["--clip-norm", "100"], "train_grad_accum.py": ["--accum-steps", "5"],
           **dict.fromkeys(["train_elastic.py", "train_DCP.py", "language/train_4D.py"], ["--snapshot-every", "3"]),
           "train_combined.py": ["--precision", "fp32", "--accum-steps", "5", "--snapshot-every", "3"]}
# What the commands of `runs` share. Processes and micro-batches divide a batch of 96 evenly or not: 48, 32, 9.6
SAME = ["--epochs", "2", "--batch-size", "96", "--seed", "3", "--save-every", "1", "--workers", "0"]

# What the launchers of clusters are compared with
REFERENCE = ["train_DDP.py", "--epochs", "2", "--batch-size", "96", "--lr", "0.0003"]

Finished = collections.namedtuple("Finished", "code out err")

# Several tests run at a time: a thread that waits for the others of its process must not keep a core busy meanwhile.
# Three of train.py at a time on two cores then need 10 s instead of 22. Set before torch is loaded, here and below.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

if importlib.metadata.version("torch").startswith("2.11."):  # its launches on one host all use port 29500
    os.environ |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0"}

# What a good run does not print on standard error
NOISE = re.compile(r"Traceback \(most|^[\w.]+(Error|Exception|Interrupt)\b(:|$)|Exception (ignored|in thread)|\bleak|"
                   r"Warning: |core dumped")
EXPLAINED = {
    r"(site|dist)-packages/\S+:\d+: \w+Warning: ": "a package warns of its own code: each version of it differs",
    r"/lib/python3\.\d+/\S+:\d+: \w+Warning: ": "Python, of its own code: each version differs",
    r"\[W\d+ .*\.cpp:\d+\] Warning: ": "torch's C++, such as that --find-unused-parameters has found none"}

# Where a test launches a script in STRICT, all other warnings are errors if TESTS_WARNINGS=error, as in .ci/run
ALLOWED = {
    "ignore::ResourceWarning": "a run keeps the lock of its --output-dir open until it ends: common/checkpoint.py",
    "ignore:The module torch.distributed.launch is deprecated:FutureWarning": "it starts what torchrun starts",
    "ignore:The image decoding and encoding:DeprecationWarning": "torchvision's; common/images.py prefers torchcodec",
    "ignore:FSDP2-wrapped module:UserWarning": "train_TP.py: split layers return views; nothing changes them in place"}
WARNINGS = {"PYTHONWARNINGS": ",".join(["error", *ALLOWED])}  # inherited by a launcher's processes and their workers
STRICT = WARNINGS if os.environ.get("TESTS_WARNINGS") == "error" else {}

# A shell starts a background job with Ctrl-C ignored, and its children inherit that: tests send it
signal.signal(signal.SIGINT, signal.default_int_handler)


def command(script, processes=2):
    """Return the first command of a script's docstring, up to the script's name, and its OPTIONS."""
    words = markers.words(ROOT / script)
    found = re.search(rf"^    (?:\w+=\S+ )*(.+?) {re.escape(' '.join(words))}\b", (ROOT / script).read_text(), re.M)
    start = found[1] if found else ""
    starts = {"python": [PYTHON], "torchrun": [*TORCHRUN, f"--nproc-per-node={processes}"],
              "python -m torch.distributed.launch": [*LAUNCH, f"--nproc_per_node={processes}"]}
    if start.split(" --")[0] not in starts:
        raise ValueError(f"{script}: the first command of its docstring starts with none of {', '.join(starts)}")
    return [*starts[start.split(" --")[0]], *words, *OPTIONS.get(script, [])]


RUNS = {script: [*command(script), *SAME] for script in SCRIPTS} | {
    "train_DDP.py on 3": [*command("train_DDP.py", 3), *SAME]}
RUNS["train_mp.py"].append("--find-unused-parameters")  # DDP warns if it finds none, which shows that it looked


def precision(name, folder=None):
    """Return the environment in which a command of RUNS computes in float64; train_amp.py has its own precision."""
    return STRICT | ({} if name == "train_amp.py" else float64(folder) if folder else FLOAT64)


def run(*command, cwd=ROOT, env=None, terminal=False, seconds=300, quiet=True):
    """Run a command until it ends, and return (exit code, standard output, standard error).

    With `terminal`, standard error is a pseudo-terminal, so that progress bars show. Fails if the command outlasts
    `seconds`, or if a process that it started outlives it by 60 s. A good run must be `quiet`, except where a test
    kills one of its processes.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_NUM_"))}
    command = [str(part) for part in command]
    master, slave = _open_terminal() if terminal else (None, subprocess.PIPE)
    if command[:3] == TORCHRUN and not terminal:  # Live and LAUNCH start it as a program
        process = forked.Torchrun(command[3:], cwd, environment | (env or {}))
    else:
        process = subprocess.Popen(command, cwd=cwd, env=environment | (env or {}), start_new_session=True, text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave)
    shown = []
    if terminal:
        os.close(slave)
        reader = threading.Thread(target=_read_terminal, args=(master, shown))
        reader.start()
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        where = stacks(process.pid)
        for pid in descendants(process.pid):  # torchrun's processes, in sessions of their own, hold our pipes open
            os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"not at an end after {seconds} s: {' '.join(command)}\n{out[-2000:]}\n{(err or '')[-2000:]}\n"
                    f"{where}")
    finally:
        if terminal:
            reader.join()
            os.close(master)
    end = time.monotonic() + 60
    while (left := processes_of_session(process.pid)) and time.monotonic() < end:
        time.sleep(0.05)  # multiprocessing's resource tracker notices a moment later that its parent has ended
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes outlived {' '.join(command)}"
    err = "".join(shown) if terminal else err
    noise = unexplained(err) if quiet and not process.returncode else []
    assert not noise, f"a good run of {' '.join(command)} says:\n{err[-3000:]}"
    return Finished(process.returncode, out, err)


def unexplained(err, noise=NOISE, explained=EXPLAINED):
    """Return the lines of `noise` on standard error that no pattern of `explained` allows."""
    return [line for line in re.split(r"[\r\n]+", err)
            if noise.search(line) and not any(re.search(known, line) for known in explained)]


def py_spy():
    """Return the path of py-spy beside this Python or in PATH, or None."""
    return shutil.which("py-spy", path=f"{Path(PYTHON).parent}:{os.environ['PATH']}")


def stacks(pid):
    """Return the stacks of a process and of all its descendants, if py-spy is installed."""
    if not py_spy():
        return "no stacks: py-spy is not installed (requirements/drill.txt)"
    said = subprocess.run([py_spy(), "dump", "--subprocesses", "--pid", str(pid)], capture_output=True, text=True,
                          timeout=60)
    return said.stdout + said.stderr


def _open_terminal():
    import fcntl  # here: Windows lacks these modules, and runs the unit tests
    import pty
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))  # a bar fills its terminal
    return master, slave


def _read_terminal(master, shown):
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # the last writer has closed it
            return
        shown.append(data.decode(errors="replace"))


def _living():
    """Yield the process ID, the parent's and the session's of each living process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent, _, session = stat.read_text().rsplit(") ", 1)[1].split()[:4]
            if state not in "ZX":
                yield int(stat.parent.name), int(parent), int(session)


def descendants(process):
    """Return a living process and all its descendants, itself first."""
    found, living = [process], list(_living())
    for ancestor in found:
        found += [pid for pid, parent, _ in living if parent == ancestor]
    return found


def processes_of_session(session):
    """Return the living processes of a session: those that a command started and did not end."""
    return [pid for pid, _, its_session in _living() if its_session == session]


def good(finished):
    """Return the result of a run that must have succeeded."""
    assert finished.code == 0, f"exit code {finished.code}\n{finished.out[-3000:]}\n{finished.err[-3000:]}"
    return finished


def epochs(out):
    """Return the numbers in each epoch's line of a run: one dict per epoch."""
    return [{name: float(value) for name, value in
             re.findall(r"\b((?:ema_)?(?:loss|val_loss|accuracy|top5|mAP50|mAP|lr)) ([-+.\dinfae]+)", line)}
            for line in out.splitlines() if line.startswith("epoch")]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def copy_out(script, folder):
    """Copy a script, or the wing that contains it, and common/ into an empty folder; return the script's path there."""
    folder.mkdir(parents=True)
    for each in ["common", *Path(script).parts[:-1]]:
        shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
    return Path(shutil.copy(ROOT / script, folder / script))


def copy_classifiers(folder, digits):
    """Copy the scripts that train train.py's model, with a data set of the first `digits` digits; return the folder."""
    import numpy as np

    copy_out("train.py", folder)
    for script in SCRIPTS:
        shutil.copy(ROOT / script, folder)
    file = folder / "common/digits.npz"
    with np.load(file) as whole:
        few = {name: values[:digits] for name, values in whole.items()}
    np.savez(file, **few)
    return folder


def replace_lines(file, lines):
    """Replace texts that each occur once in a file, given {old text: new text}."""
    text = file.read_text()
    for old, new in lines.items():
        assert text.count(old) == 1, f"{file} must contain once: {old}"
        text = text.replace(old, new)
    file.write_text(text)


def whole_file(folder, file):
    """Convert a folder of train_DCP.py to a file, as a user does."""
    return good(run(PYTHON, "-m", "common.dcp_folders", folder, file))


def load(path):
    """Return a checkpoint's content, loaded safely."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def distance(left, right):
    """Return the greatest difference between any two weights of two checkpoints."""
    left, right = load(left)["model"], load(right)["model"]
    assert left.keys() == right.keys() and left.pop("_extra_state", None) == right.pop("_extra_state", None)
    return max((left[name].double() - right[name].double()).abs().max().item() for name in left)


def same(left, right):
    """Return whether two checkpoint contents are equal bit for bit, types included."""
    import torch

    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Return a function that runs `make(folder)` once for all of pytest's processes, and returns (folder, result).

    And once for all sessions that name the same folder in TESTS_FOLDER, as the suite and the drills do in .ci/run. The
    folder must be new: nothing here notices that the code has changed since.
    """
    base = tmp_path_factory.getbasetemp()
    shared = Path(os.environ.get("TESTS_FOLDER") or (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base))

    def get(name, make):
        folder, said = shared / name, shared / f"{name}.json"
        shared.mkdir(exist_ok=True)
        with FileLock(f"{said}.lock"):
            if not said.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a run that failed
                folder.mkdir()
                said.write_text(json.dumps(good(make(folder))))
        return folder, Finished(*json.loads(said.read_text()))

    return get


@pytest.fixture(scope="session")
def scripts(tmp_path_factory):
    """Return a folder with copies of SCRIPTS: 5 steps of 96 samples per epoch, because float64 convolutions are slow.

    The 484 samples to train leave an incomplete batch, and two processes do not divide the 121 to validate.
    """
    return copy_classifiers(tmp_path_factory.mktemp("few") / "copy", 605)


@pytest.fixture(scope="session")
def runs(once, scripts):
    """Return a function from a name in RUNS to (folder, result): it runs the command in `scripts` once, when asked for.

    Its steps are recorded in `get.steps(name)`, for verify.compare().
    """
    def get(name):
        def make(folder):
            shutil.rmtree(f"{folder}-steps", ignore_errors=True)  # of a run that failed, too
            result = run(*RUNS[name], "--output-dir", folder, cwd=scripts, env=precision(name, f"{folder}-steps"),
                         terminal=name == "train_mp.py")
            if name == "train_DCP.py":
                whole_file(folder / "step-0000010", folder / "last.pt")
            return result

        return once(name.replace(" ", "-"), make)

    get.steps = lambda name: Path(f"{get(name)[0]}-steps")
    return get


@pytest.fixture(scope="session")
def reference(once):
    """Return the last checkpoint of a run of REFERENCE by torchrun's two processes on CPUs."""
    folder, _ = once("reference", lambda folder: run(*TORCHRUN, "--nproc-per-node=2", *REFERENCE, "--output-dir",
                                                     folder, env={"CUDA_VISIBLE_DEVICES": ""}))
    return folder / "last.pt"


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Return a folder of 15 JPEG images in three classes that a small network can tell apart by their colors."""
    import numpy as np
    from PIL import Image

    random = np.random.RandomState(0)
    folder = tmp_path_factory.mktemp("photos")
    for label, (name, number) in enumerate([("ash", 5), ("beech", 4), ("cedar", 6)]):
        (folder / name).mkdir()
        for index in range(number):
            height, width = random.randint(60, 120, 2)
            pixels = random.randint(0, 150, (height, width, 3))
            pixels[..., label] += 100
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{index:02}.jpg", quality=90)
    (folder / "LICENSE.txt").write_text("a file that is no picture, as the flower photos have one\n")
    return folder


@pytest.fixture
def broken_photo(photos, tmp_path):
    """Return (folder, file): a split copy of the photos, and the truncated one, which is in the training set."""
    for split in ("train", "val"):
        shutil.copytree(photos, tmp_path / "data" / split)
    broken = tmp_path / "data/train/ash/03.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    return tmp_path / "data", broken


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """Return a folder with a dataset of `lines`: 24 images to train, 7 to validate; every third one has no box."""
    from torchvision.transforms.v2.functional import to_pil_image

    from detection import data

    folder = tmp_path_factory.mktemp("scenes")
    for name, dataset, count in zip(("train", "val"), data.create_datasets("scenes", "", 96, 0), (24, 7)):
        lines = []
        for index in range(count):
            image, labels = dataset[index]
            to_pil_image(image).save(folder / f"{name}{index}.png")
            boxes = [f"{x:g},{y:g},{right:g},{bottom:g},{kind:g}" for _, kind, x, y, right, bottom in labels.tolist()]
            lines.append(" ".join([f"{name}{index}.png", *(boxes if index % 3 else [])]))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def alone(monkeypatch):
    """Let a script run in this process, without a launcher's variables; afterwards, undo its group and settings."""
    import torch

    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what join_group() sets is taken back
        del os.environ[name]
    threads = torch.get_num_threads()
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)
    for number, handler in handlers.items():  # what the tests start would inherit that a stopped script ignores them
        signal.signal(number, handler)


@pytest.fixture
def group(alone):
    """Create a process group of this process alone, on gloo, and return it."""
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def pytest_collection_modifyitems(items):
    """Mark the tests in tests/drills as drills, except those marked nightly or long."""
    for item in items:
        if ROOT / "tests/drills" in item.path.parents and not (
                item.get_closest_marker("long") or item.get_closest_marker("nightly")):
            item.add_marker("drill")


def _not_run(reporter):
    skipped = reporter.stats.get("skipped", [])
    return [report for report in skipped if "gpu" in getattr(report, "keywords", ())]  # a skipped file has no keywords


def pytest_terminal_summary(terminalreporter):
    """List each test for GPUs that this machine cannot run, with the reason."""
    for report in _not_run(terminalreporter):
        terminalreporter.line(f"NOT RUN {report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}")


def pytest_sessionfinish(session):
    """Do not exit with 0 if none of the selected tests could run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # None in a process of pytest-xdist
    if reporter and _not_run(reporter) and not reporter.stats.get("passed") and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
