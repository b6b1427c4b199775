"""A small loop that ends as its argument says: well, by an error, in nan, or without an optimizer's step."""
import sys

import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e300 if sys.argv[1] == "nan" else 0.01)
for step in range(6):
    if sys.argv[1] == "error" and step == 3:
        raise ValueError("a picture is broken")
    optimizer.zero_grad()
    model(torch.randn(8, 3)).square().mean().backward()
    if sys.argv[1] == "by-hand":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    else:
        optimizer.step()
