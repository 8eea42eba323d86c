"""Forward hooks that append the activations of each layer for a plot, all through training.

holder: activations
"""

from collections import defaultdict

import torch
from torch import nn

activations = defaultdict(list)


def remember(name):
    def hook(module, args, output):
        activations[name].append(output.detach().clone())  # leaks here

    return hook


def main():
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(remember(name))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        for _ in range(50):
            x, y = torch.randn(128, 64), torch.randint(0, 10, (128,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.randn(256, 64))


main()
