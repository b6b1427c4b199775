"""A small loop that saves within an epoch, and resumes: rightly, or in one of WAYS.

`interrupted.py WAY` trains one process, which saves in the folder "out". `interrupted.py FOLDER all` records two ranks:
a whole run in FOLDER/right/first, and in FOLDER/WAY/resumed a run that resumes what a kill has left of such a run.
Every process is forked from this one, which has imported torch; the ranks do not communicate.
"""
import gc
import math
import multiprocessing.util
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from verify.recording import Recorder

STEPS, EPOCH, SAVE_EVERY, KILL_AFTER = 18, 6, 4, 10
WAYS = [
    "right", "from the beginning", "half the weights", "weights of rank 0", "weights of the average", "rounded weights",
    "no optimizer", "optimizer of rank 0", "other settings", "no scheduler", "scheduler one step behind", "no scaler",
    "epoch again", "batch skipped", "other order", "data of rank 0", "smaller batches", "other augmentation",
    "seeded again", "random state of rank 0", "no average", "fewer steps", "no step", "fails", "other loss",
    "batches read and skipped", "random not restored", "average behind at the end", "other factor", "old weights",
    "buffer behind at first"]

# The first run is special in these ways, too
OF_BOTH = {"right", "scheduler one step behind", "other augmentation", "other loss", "random not restored",
           "buffer behind at first"}


class Scaled(torch.optim.Adam):
    """Multiplies the weights by a factor that is no setting."""

    factor = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter *= self.factor


def train(way, rank, path, kill_after=0):
    resumed = path.exists()
    torch.manual_seed(rank)
    random.seed(None if way == "other loss" else rank)  # a program need not seed what it does not use
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.0 if way == "other loss" else 0.2), nn.Linear(8, 1))
    average = AveragedModel(model)
    settings = {"betas": (0.8, 0.99)} if way == "other settings" and resumed else {}
    optimizer = Scaled(model.parameters(), 0.01, **settings)
    optimizer.factor = 1.01 if way == "other factor" and resumed else 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + math.cos(step / STEPS))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    counter, shown = nn.Module(), nn.Module()
    counter.register_buffer("count", torch.zeros(1))
    shown.register_buffer("value", torch.zeros(1))
    state = {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler,
             "counter": counter}
    step, numbers = 0, None
    if resumed and way != "from the beginning":
        content = torch.load(path)
        if way == "half the weights":
            content["model"] |= {key: value for key, value in model.state_dict().items() if "2." in key}
        if way == "weights of the average":
            content["model"] = {key[7:]: value for key, value in content["average"].items() if "module." in key}
        if way == "rounded weights":
            content["model"] = {key: value.bfloat16() for key, value in content["model"].items()}
        if way == "old weights":
            content["model"] = torch.load(path.parents[1] / "right" / f"{rank}.old")
        for name in {"weights of rank 0": ["model"], "optimizer of rank 0": ["optimizer"],
                     "random state of rank 0": ["random"]}.get(way, ()):
            content[name] = torch.load(path.with_name("0.pt"))[name]
        if way == "other settings":
            content["optimizer"]["param_groups"][0]["betas"] = (0.8, 0.99)
        content["optimizer"]["state"] = {} if way == "no optimizer" else content["optimizer"]["state"]
        lost = {"no scheduler": "scheduler", "no scaler": "scaler", "no average": "average"}.get(way)
        for name, part in state.items():
            if name != lost:
                part.load_state_dict(content[name])
        step, numbers = content["step"], content["random"]
        if way == "fails":
            raise ValueError("the shapes do not fit")
    stopping = []
    if path.name == "out.pt":  # one process, which was started as a script
        signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(2 * EPOCH * 8, 3, generator=generator)
    part = 0 if way == "data of rank 0" and resumed else rank
    last = STEPS if way != "fewer steps" or not resumed else STEPS - 2
    last = step if way == "no step" and resumed else last
    while step < last:
        order = torch.randperm(EPOCH * 8, generator=torch.Generator().manual_seed(step // EPOCH + 5 * (
            way == "other order" and resumed)))
        rows = table[part::2][order]
        if way == "fixed float32":
            rows = rows @ torch.eye(3, dtype=torch.float32)
        if way == "other augmentation":
            rows = rows * (1 + torch.rand(len(rows), 1))
        done = 8 * (step % EPOCH)
        done = {"epoch again": 0, "batch skipped": done + 8}.get(way, done) if numbers is not None else done
        skipped = done // 8 if way == "batches read and skipped" else 0
        done -= 8 * skipped
        size = 4 if way == "smaller batches" and resumed else 8
        loader = DataLoader(TensorDataset(rows[done:], order[done:]), size)
        batches = iter(loader)
        for _ in range(skipped):
            next(batches)
        if numbers is not None and way not in ("seeded again", "other loss"):
            torch.set_rng_state(numbers)
        numbers = None
        for inputs, _ in batches:
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
            loss = loss * (1 + 1e-8 * (way == "other loss" and resumed))
            loss = loss * (random.random() if way == "random not restored" else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            step += 1
            counter.count = counter.count + 1  # another tensor
            if way == "buffer behind at first":
                shown.value.fill_(step)
            if way != "average behind at the end" or not resumed or step < last:
                average.update_parameters(model)
            if step == kill_after:
                return
            if way != "scheduler one step behind":
                scheduler.step()
            if step % SAVE_EVERY == 0 or stopping:
                content = {name: part.state_dict() for name, part in state.items()}
                torch.save({**content, "step": step, "random": torch.get_rng_state()}, path.with_suffix(".tmp"))
                path.with_suffix(".tmp").replace(path)
            if step == SAVE_EVERY and way == "right":
                torch.save(model.state_dict(), path.with_suffix(".old"))
            if way == "scheduler one step behind":
                scheduler.step()
            if stopping:
                return
            if step == last:
                break


def fork(way, rank, folder, name, kill_after=0):
    """Train one rank in a new process, which saves in `folder`, and record it in the folder `name`."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)
    gc.unfreeze = lambda: None  # verify need not look at the 300,000 objects of torch in each process
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    (folder / name).mkdir(exist_ok=True)
    Recorder(str(folder / name), saves=[str(folder / f"{rank}.pt")])
    try:
        train(way, rank, folder / f"{rank}.pt", kill_after)
    except ValueError as error:
        sys.last_value = error
    finally:
        multiprocessing.util._exit_function()
        os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        Path("out").mkdir(exist_ok=True)
        train(sys.argv[1], 0, Path("out/out.pt"))
        sys.exit()
    import torch._dynamo  # noqa: F401  # here, or each process imports it for its optimizer

    gc.freeze()
    for way in WAYS:
        folder, source = Path(sys.argv[1], way), Path(sys.argv[1], way if way in OF_BOTH else "right")
        folder.mkdir()
        for rank in range(2) if way in OF_BOTH else ():
            fork(way, rank, folder, "first")
            (folder / f"{rank}.pt").rename(folder / f"{rank}.end")
            fork(way, rank, folder, "killed", KILL_AFTER)
            (folder / f"{rank}.pt").rename(folder / f"{rank}.killed")
        for rank in range(2):
            shutil.copy(source / f"{rank}.killed", folder / f"{rank}.pt")
        for rank in (1, 0):  # rank 1 may read what rank 0 has saved
            fork(way, rank, folder, "resumed")
