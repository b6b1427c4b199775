"""Classify points with dropout, loss scaling and an average of the weights, with checkpoints within an epoch.

A: torchrun --nproc-per-node=2 {}
B: torchrun --nproc-per-node=2 {}
Resume: out
Bug: Megatron-LM-6858: random-state: https://github.com/NVIDIA/Megatron-LM/pull/6858
    252 of 256 ranks resume with the random state of another rank: only one rank's state is saved.
Bug: ace-690: random-state: https://github.com/ai2cm/ace/issues/690
    The seed is set again when a run resumes, so it repeats the random numbers of its beginning.
Bug: ultralytics-21913: scaler: https://github.com/ultralytics/ultralytics/issues/21913
    Training diverges after a resume: the checkpoint lacks the state of the GradScaler.
Bug: KempnerForge-115: optimizer-state: https://github.com/KempnerInstitute/KempnerForge/pull/115
    The new optimizer has no moments yet, so the loader finds nothing to fill, and drops the saved ones.
Bug: pytorch-lightning-15462: learning-rate: https://github.com/Lightning-AI/pytorch-lightning/issues/15462
    The scheduler starts its schedule again.
Bug: torch-points3d-630: learning-rate: https://github.com/torch-points3d/torch-points3d/pull/630
    The scheduler is created after the optimizer was restored, and resets its rate.
Bug: allennlp-1650: learning-rate: https://github.com/allenai/allennlp/pull/1650
    Checkpoints are saved before the scheduler's step, so a resumed schedule is one step behind.
Bug: Samudra-282: buffers: https://github.com/m2lines/Samudra/issues/282
    The average is loaded, then initialized again from the weights.
Bug: YOLOX-1318: weights: https://github.com/Megvii-BaseDetection/YOLOX/issues/1318
    Only the average is saved, and the model starts from it, too.
Bug: examples-1029: weights|not-resumed: https://github.com/pytorch/examples/issues/1029
    With strict=False, keys with another prefix are ignored, and the model keeps its first weights.
Bug: accelerate-4071: data: https://github.com/huggingface/accelerate/pull/4071
    Within an epoch, a run resumes with the order of epoch 0: the loader that skips batches has its own counter.
Bug: sd-scripts-1999: step-counter: https://github.com/kohya-ss/sd-scripts/issues/1999
    After 5 of 10 epochs, a resumed run trains for 10 more epochs.
Bug: verl-7401: data: https://github.com/verl-project/verl/issues/7401
    A run that resumes from the end of an epoch skips the next epoch.
Options verl-7401: --save-every 5
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, PATH = 3, 24, "out/last.pt"


def create_data():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(240, 4, generator=generator)
    return TensorDataset(points, (points.square().sum(1) > 3.3).long())


def save(state, step):
    rank, world = dist.get_rank(), dist.get_world_size()
    random_states = [None] * world
    dist.all_gather_object(random_states, torch.get_rng_state())
    if rank == 0:
        content = {name: part.state_dict() for name, part in state.items()}
        # wrong YOLOX-1318: content["model"] = state["average"].module.state_dict()
        # wrong ultralytics-21913: del content["scaler"]
        torch.save({**content, "step": step, "random": random_states}, PATH + ".tmp")
        os.replace(PATH + ".tmp", PATH)


def load(state):
    """Return the number of finished steps, and the random states of the ranks."""
    if not os.path.exists(PATH):
        return 0, None
    content = torch.load(PATH)
    # wrong KempnerForge-115: content["optimizer"]["state"] = {}
    # wrong pytorch-lightning-15462: del content["scheduler"]
    # wrong torch-points3d-630: del content["scheduler"]
    # wrong examples-1029: content["model"] = {f"module.{key}": value for key, value in content["model"].items()}
    for name, part in state.items():
        if name in content:
            # wrong examples-1029: part.load_state_dict(content[name], **({"strict": False} if name == "model" else {}))
            part.load_state_dict(content[name])  # wrong examples-1029: pass
    # wrong Samudra-282: state["average"].module.load_state_dict(state["model"].state_dict())
    # wrong torch-points3d-630: for group, rate in zip(state["optimizer"].param_groups, state["scheduler"].base_lrs):
    # wrong torch-points3d-630:     group["lr"] = rate * state["scheduler"].lr_lambdas[0](0)
    return content["step"], content["random"]


def main(save_every):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs("out", exist_ok=True)
    torch.manual_seed(0)
    data = create_data()
    sampler = DistributedSampler(data, world, rank, seed=7)
    loader = DataLoader(data, BATCH // world, sampler=sampler)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
    parallel_model = DistributedDataParallel(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    total = EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 8) * (1.1 + math.cos(math.pi * step / total)) / 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    state = {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    torch.manual_seed(100 + rank)
    step, random_states = load(state)
    epochs = range(step // len(loader), EPOCHS)
    # wrong verl-7401: epochs = range(step // len(loader) + bool(step and step % len(loader) == 0), EPOCHS)
    # wrong sd-scripts-1999: epochs = range(step // len(loader), step // len(loader) + EPOCHS)

    for epoch in epochs:
        sampler.set_epoch(epoch)
        # wrong accelerate-4071: sampler.set_epoch(0 if step % len(loader) else epoch)
        batches = iter(loader)
        for _ in range(step % len(loader)):
            next(batches)
        if random_states:
            # wrong Megatron-LM-6858: random_states = [random_states[0]] * world
            # wrong ace-690: random_states[rank] = torch.get_rng_state()
            torch.set_rng_state(random_states[rank])
            random_states = None
        for points, classes in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel_model(points), classes)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)
            step += 1
            # wrong allennlp-1650: if step % save_every == 0: save(state, step)
            scheduler.step()
            if step % save_every == 0:  # wrong allennlp-1650: if False:
                save(state, step)
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=4)
    main(parser.parse_args().save_every)
    dist.destroy_process_group()
