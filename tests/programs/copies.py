"""Let the processes of a tensor group drift apart, equalize them, and print which tensors are then equal."""
import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import train_TP
from common import models, tensor_parallel

dist.init_process_group("gloo")
grid = dist.init_device_mesh("cpu", **tensor_parallel.tp_mesh(2, torch.device("cpu")))
torch.manual_seed(0)
model = models.create_model("vit", 10, (1, 28, 28))
parallelize_module(model, grid["tensor"], tensor_parallel.check_plan(model, train_TP.PLAN, grid))
fully_shard(model, mesh=grid["data"])
optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
model(torch.rand(2, 1, 28, 28)).square().sum().backward()
optimizer.step()
held = {name: (weight.detach().to_local(), optimizer.state[weight]["momentum_buffer"].to_local())
        for name, weight in model.named_parameters()}
for tensors in held.values():
    for tensor in tensors:
        tensor += dist.get_rank()
tensor_parallel.equalize(model, optimizer, grid["tensor"])
both = [None, None]
dist.all_gather_object(both, {name: [tensor.tolist() for tensor in tensors] for name, tensors in held.items()})
if dist.get_rank() == 0:
    print(json.dumps({name: [left == right for left, right in zip(both[0][name], both[1][name])] for name in both[0]}))
dist.barrier()
dist.destroy_process_group()
