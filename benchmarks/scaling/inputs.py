"""Inputs of model.py: the CNN's step time, measured here on one thread, and counts of parameters and operations."""
import time

import torch
from torch import nn
from torchvision.models import resnet50

from benchmarks.measure import machine
from benchmarks.scaling.model import FLOPS
from benchmarks.step import Step, count_operations
from benchmarks.tables import ratio, spread
from common import datasets

CNN_IMAGES, RESNET_IMAGES, TRANSFORMER_TOKENS = 64, 256, 8 * 2048  # per step


def transformer() -> nn.Sequential:
    """Return FSDP2's units of a transformer with 1.01 billion parameters in GPT-2's shape, allocating no memory."""
    width, context, vocabulary = 2048, 2048, 50304  # the output layer shares the token embedding's weights
    with torch.device("meta"):
        body = (nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, norm_first=True) for _ in range(18))
        ends = nn.Embedding(vocabulary, width), nn.Embedding(context, width), nn.LayerNorm(width)
        return nn.Sequential(*ends, *body)


def measure(seconds: float = 6) -> dict:
    """Measure and return the inputs."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    step = Step("cnn", CNN_IMAGES, device, datasets.create_datasets("fake", "", 0, "")[0])
    times, backward = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        loss = step.forward()
        middle = time.perf_counter()
        loss.backward()
        backward.append(time.perf_counter() - middle)
        step.optimizer.step()
        times.append(time.perf_counter() - start)
    times, backward = times[20:], backward[20:]  # the first steps also choose kernels
    with torch.device("meta"):
        nets = {"CNN": step.model, "ResNet-50": resnet50(), "1B transformer": transformer()}
    size = {name: sum(weight.numel() for weight in net.parameters()) for name, net in nets.items()}
    image = count_operations(nets["ResNet-50"], (3, 224, 224))
    tokens = 6 * size["1B transformer"] * TRANSFORMER_TOKENS  # arXiv:2001.08361, section 2.1
    steps = spread(times)["median"], image * RESNET_IMAGES / FLOPS, tokens / FLOPS
    found = {name: {"parameters": size[name], "step_seconds": each, "on_gpus": name != "CNN"}
             for name, each in zip(nets, steps)}
    found["1B transformer"]["units"] = len(nets["1B transformer"])
    return {"machine": machine(device), "cnn_step": spread(times), "cnn_steps": len(times),
            "cnn_backward_share": ratio(backward, times)["median"], "resnet50_flops_per_image": image, "models": found}
