"""A callback that keeps the outputs that its trainer hands it, loss with its graph among them.

holder: callbacks[1].batches | callbacks[].batches | .batches
"""

import torch
from torch import nn


class Callback:
    def on_batch_end(self, trainer, outputs):
        pass


class Timer(Callback):
    def __init__(self):
        self.num_batches = 0

    def on_batch_end(self, trainer, outputs):
        self.num_batches += 1


class BatchRecorder(Callback):
    def __init__(self):
        self.batches = []

    def on_batch_end(self, trainer, outputs):
        self.batches.append(outputs)  # leaks here


class Trainer:
    def __init__(self, model, callbacks):
        self.model, self.callbacks = model, callbacks
        self.optimizer = torch.optim.Adam(model.parameters())

    def step(self, x, y):
        logits = self.model(x)  # leaks here
        loss = nn.functional.mse_loss(logits, y)  # leaks here
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for callback in self.callbacks:
            callback.on_batch_end(self, {"loss": loss, "logits": logits})

    def fit(self, num_epochs):
        for _ in range(num_epochs):
            for _ in range(60):
                self.step(torch.randn(256, 32), torch.randn(256, 64))


def main():
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64))
    Trainer(model, [Timer(), BatchRecorder()]).fit(4)


if __name__ == "__main__":
    main()
