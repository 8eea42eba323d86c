"""A thread prepares batches ahead, in a queue with a bound; a pool of pinned-like buffers is used."""

import queue
import threading

import torch
from torch import nn


def produce(batches, num_batches):
    for _ in range(num_batches):
        batches.put((torch.randn(64, 256), torch.randint(0, 10, (64,))))
    batches.put(None)


def main():
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        batches = queue.Queue(maxsize=16)
        thread = threading.Thread(target=produce, args=(batches, 60), daemon=True)
        thread.start()
        while (batch := batches.get()) is not None:
            x, y = batch
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        thread.join()


main()
