"""Prints where the batches of loader.py are, and their sums.

    PYTHONPATH=. python tests/programs/probe.py --workers 0
"""
import loader

if __name__ == "__main__":
    args = loader.parse_args()
    loader.join_group(args)
    for inputs, targets in loader.build_loader(args):
        print(inputs.device, targets.device, inputs.shape, inputs.double().sum().item(), targets.double().sum().item())
