import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


def double(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.InstanceNorm2d(cout, affine=True), nn.LeakyReLU(0.01, inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1), nn.InstanceNorm2d(cout, affine=True), nn.LeakyReLU(0.01, inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, base=32, depth=4, num_classes=2, checkpointing=False):
        super().__init__()
        widths = [base * 2**i for i in range(depth + 1)]
        self.downs = nn.ModuleList(double(a, b) for a, b in zip([1] + widths[:-1], widths))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths[:-1], widths[1:]))
        self.fuse = nn.ModuleList(double(2 * a, a) for a in widths[:-1])
        self.heads = nn.ModuleList(nn.Conv2d(a, num_classes, 1) for a in widths[:2])
        self.pool = nn.MaxPool2d(2)
        self.checkpointing = checkpointing

    def run(self, block, x):
        if self.checkpointing and self.training and x.requires_grad:
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    def forward(self, x):
        skips = []
        for i, down in enumerate(self.downs):
            x = self.run(down, x if i == 0 else self.pool(x))
            skips.append(x)
        outs = []
        for i in reversed(range(len(self.ups))):
            x = torch.cat([self.ups[i](x), skips[i]], dim=1)
            x = self.run(self.fuse[i], x)
            if i < len(self.heads):
                outs.append(self.heads[i](x))
        return outs[::-1] if self.training else outs[-1]
