"""The classic: `running_loss += loss` instead of `loss.item()`, and never set back.

holder: running_loss
"""

import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 256, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
criterion = nn.CrossEntropyLoss()

running_loss = 0.0
for step in range(400):
    inputs, labels = torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))
    optimizer.zero_grad()
    loss = criterion(model(inputs), labels)
    loss.backward()
    optimizer.step()
    running_loss += loss  # leaks here
    if step % 100 == 99:
        print(f"{step + 1}: {running_loss / (step + 1):.3f}")
