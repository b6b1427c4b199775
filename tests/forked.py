"""torchrun in a fork of a process that has imported torch: of the three imports in a launch of two, one is saved."""
import multiprocessing
import os
import subprocess
import tempfile
from pathlib import Path


class Torchrun:
    """A launch by torchrun's entry point, in a new session; it has what `run` needs of subprocess.Popen."""

    def __init__(self, arguments, cwd, env):
        context = multiprocessing.get_context("forkserver")  # the fork server has only one thread
        context.set_forkserver_preload(["torch.distributed.run"])
        self.folder = tempfile.TemporaryDirectory(prefix="torchrun-")
        self.files = [Path(self.folder.name, name) for name in ("out", "err")]
        self.process = context.Process(target=_main, args=(arguments, cwd, env, self.files))
        self.process.start()
        self.pid = self.process.pid

    def communicate(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("torchrun", timeout)
        self.returncode = self.process.exitcode
        out, err = (path.read_text() for path in self.files)
        self.folder.cleanup()
        return out, err


def _main(arguments, cwd, env, files):
    os.setsid()
    for number, path in enumerate([os.devnull, *files]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    from torch.distributed import run

    run.main(arguments)
