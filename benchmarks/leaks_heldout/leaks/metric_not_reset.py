"""A torchmetrics metric that is updated in every training step and never reset.

holder: metrics['train_auroc'].preds | metrics['train_auroc'].target
"""

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 2, (4096,)))
loader = DataLoader(data, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
metrics = {
    "train_acc": torchmetrics.classification.BinaryAccuracy(),
    "train_auroc": torchmetrics.classification.BinaryAUROC(),
}

for epoch in range(6):
    for x, y in loader:
        logits = model(x).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for metric in metrics.values():
            metric.update(logits.detach().sigmoid(), y)  # leaks here
    print(epoch, float(metrics["train_acc"].compute()), float(metrics["train_auroc"].compute()))
