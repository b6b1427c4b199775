"""A small loop that ends as its argument says: normally, by an error, with nan, or without an optimizer step.

"float32" ends by an error if it computes in float64. "rounded" adds a rounding error of float32. "keywords" ends
normally; its model takes arguments that have the names of verify's own. "complex" reads complex numbers from a
DataLoader, and its criterion ignores one label and weights the other. "closure" trains with LBFGS. "turns" has two
optimizers, after steps that only create the state of two others; "turns-reset" also resets the gradients of the slower
one too often. In "turns-alone", each optimizer has a backward pass of its own.
"""
import sys

import torch


class Keywords(torch.nn.Linear):
    def forward(self, *, function, module):
        return super().forward(function * module)


def on_complex_numbers():
    model, weight = torch.nn.Linear(3, 2), torch.tensor([1, 3.0])
    turn = torch.nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    optimizer = torch.optim.SGD([*model.parameters(), turn], 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(12, 3, dtype=torch.cfloat), torch.arange(12) % 2)
    for inputs, labels in torch.utils.data.DataLoader(data, 4):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model((inputs + turn).abs()), labels, weight, ignore_index=0).backward()
        optimizer.step()


def in_turns_alone():
    """As in a GAN."""
    models = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for _ in range(4):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()


def in_turns(reset):
    """The second of two optimizers steps after every second batch, and the first one gets a parameter more halfway."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    models = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for model in models:
        get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))  # takes a step with zero gradients
    scale = torch.nn.Parameter(torch.ones(1))
    for step in range(8):
        if step == 4:
            optimizers[0].add_param_group({"params": [scale]})
        models[1](models[0](torch.randn(8, 3)) * scale).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        if step % 2:
            optimizers[1].step()
        if step % 2 or reset:
            optimizers[1].zero_grad()


def loop(way):
    torch.manual_seed(0)
    if "turns" in way:
        if "alone" in way:
            in_turns_alone()
        else:
            in_turns("reset" in way)
        return
    if way == "complex":
        on_complex_numbers()
        return
    model = Keywords(3, 1) if way == "keywords" else torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e300 if way == "nan" else 0.01)
    if way == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), 0.01)
    for step in range(6):
        if way == "error" and step == 3:
            raise ValueError("a picture is broken")
        inputs = torch.randn(8, 3, dtype=torch.float32)  # as from numpy
        if way == "closure":
            def closure(inputs=inputs):
                optimizer.zero_grad()
                loss = (model(inputs) - 1).square().mean()
                loss.backward()
                return loss
            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        outputs = model(function=inputs, module=1) if way == "keywords" else model(inputs)
        if way == "rounded":
            outputs = outputs + 1e-7
        if way == "float32" and step == 3:
            outputs = outputs @ torch.ones(1, 1, dtype=torch.float32)
        torch.nn.functional.binary_cross_entropy(outputs.sigmoid(), inputs[:, :1].sigmoid()).backward()
        if way == "by-hand":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
        else:
            optimizer.step()


if __name__ == "__main__":
    loop(sys.argv[1])
