"""Large batches first, then small ones, and at last the largest, with buffers as long as needed."""

import torch
from torch import nn


class Noise:
    def __init__(self):
        self.buffer = torch.empty(0)

    def __call__(self, shape):
        n = shape.numel()
        if self.buffer.numel() < n:
            self.buffer = torch.empty(n)
        return self.buffer[:n].normal_().view(shape)


def main():
    noise = Noise()
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    optimizer = torch.optim.Adam(model.parameters())
    for size, num_steps in ((512, 100), (64, 100), (256, 60), (1024, 100)):
        for _ in range(num_steps):
            x = torch.randn(size, 128)
            loss = (model(x + 0.1 * noise(x.shape)) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
