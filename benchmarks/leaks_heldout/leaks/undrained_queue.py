"""Pictures go into a queue for a writer thread that has died.

holder: pictures | writer.pictures | .pictures
"""

import queue
import threading

import torch
from torch import nn


class Writer:
    def __init__(self):
        self.pictures = queue.Queue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        while True:
            step, picture = self.pictures.get()
            if step >= 5:
                return
            picture.mean()

    def write(self, step, picture):
        self.pictures.put((step, picture))


def main():
    writer = Writer()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3 * 64 * 64))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(250):
        z = torch.randn(16, 16)
        fake = model(z)
        loss = (fake - 0.5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.write(step, fake[:4].detach().clamp(0, 1))  # leaks here


main()
