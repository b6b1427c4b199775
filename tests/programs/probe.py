"""Prints where the batches of loader.py are, and their sums.

    PYTHONPATH=. python tests/programs/probe.py --workers 0
"""
import loader

if __name__ == "__main__":
    args = loader.parse_args()
    loader.join_group(args)
    for images, targets in loader.build_loader(args):
        print(images.device, targets.device, images.shape, images.double().sum().item(), targets.double().sum().item())
