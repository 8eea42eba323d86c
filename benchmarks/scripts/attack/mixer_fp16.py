"""An MLP-Mixer in half precision by hand: half weights, fp32 master copies, a dynamic loss scale."""
import argparse
import math
import os
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class DynamicLossScaler:
    def __init__(self, init=2.0**14, factor=2.0, window=20):
        self.scale, self.factor, self.window = init, factor, window
        self.good = 0

    @staticmethod
    def has_overflow(params):
        for p in params:
            if p.grad is not None:
                total = float(p.grad.float().sum())
                if math.isinf(total) or math.isnan(total):
                    return True
        return False

    def update(self, overflow):
        if overflow:
            self.scale = max(self.scale / self.factor, 1.0)
            self.good = 0
        else:
            self.good += 1
            if self.good % self.window == 0:
                self.scale *= self.factor


class FP16Optimizer:
    """Holds fp32 masters of half parameters and copies gradients and weights between them."""

    def __init__(self, model, make_optimizer, clip):
        self.half = [p for p in model.parameters() if p.requires_grad]
        self.master = [p.detach().clone().float().requires_grad_() for p in self.half]
        self.optimizer = make_optimizer(self.master)
        self.scaler = DynamicLossScaler()
        self.clip = clip
        self.skipped = 0

    def zero_grad(self):
        for p in self.half:
            p.grad = None

    def backward(self, loss):
        (loss.float() * self.scaler.scale).backward()

    def step(self):
        overflow = self.scaler.has_overflow(self.half)
        if overflow:
            self.skipped += 1
            self.scaler.update(True)
            return None
        for m, p in zip(self.master, self.half):
            if m.grad is None:
                m.grad = torch.empty_like(m)
            m.grad.copy_(p.grad)
            m.grad.mul_(1.0 / self.scaler.scale)
        norm = nn.utils.clip_grad_norm_(self.master, self.clip)
        self.optimizer.step()
        for m, p in zip(self.master, self.half):
            p.data.copy_(m.data)
        self.scaler.update(False)
        return norm

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "scale": self.scaler.scale, "master": self.master}


class Stripes(IterableDataset):
    """An endless stream of synthetic images, cached in shards on disk."""

    def __init__(self, root, size, num_classes=16, shards=4, per_shard=64):
        os.makedirs(root, exist_ok=True)
        self.paths = [os.path.join(root, f"shard{i}_{size}.pt") for i in range(shards)]
        for i, path in enumerate(self.paths):
            if os.path.exists(path):
                continue
            g = torch.Generator().manual_seed(i)
            y = torch.randint(num_classes, (per_shard,), generator=g)
            freq = (y[:, None, None] + 2) / size * 2 * math.pi
            ramp = torch.arange(size)[None, None] + torch.arange(size)[None, :, None] * (y[:, None, None] % 3)
            phase = torch.rand(per_shard, 1, 1, generator=g) * 6
            x = torch.sin(ramp * freq + phase)[:, None].repeat(1, 3, 1, 1) + torch.randn(per_shard, 3, size, size, generator=g) * 0.3
            torch.save((x.half(), y), path)

    def __iter__(self):
        info = get_worker_info()
        paths = self.paths if info is None else self.paths[info.id :: info.num_workers]
        while True:
            for path in paths:
                x, y = torch.load(path)
                for i in torch.randperm(len(y)):
                    yield x[i], y[i]


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim, token_hidden, channel_hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_mix = nn.Sequential(nn.Linear(tokens, token_hidden), nn.GELU(), nn.Linear(token_hidden, tokens))
        self.channel_mix = nn.Sequential(nn.Linear(dim, channel_hidden), nn.GELU(), nn.Linear(channel_hidden, dim))

    def forward(self, x):
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, size, patch, dim, depth, num_classes):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch)
        tokens = (size // patch) ** 2
        self.blocks = nn.Sequential(*(MixerBlock(tokens, dim, dim // 2, dim * 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/stripes")
    parser.add_argument("--out", default="out/mixer")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--patch", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--iters", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        warnings.warn("no gpu found, bfloat16 instead of float16")
    half = torch.float16 if device.type == "cuda" else torch.bfloat16

    loader = iter(DataLoader(Stripes(args.data, args.size), args.batch_size, num_workers=args.workers))
    model = Mixer(args.size, args.patch, args.dim, args.depth, 16).to(device).to(half)
    opt = FP16Optimizer(model, lambda ps: torch.optim.AdamW(ps, lr=args.lr, weight_decay=0.05), clip=1.0)
    net = torch.compile(model) if args.compile else model
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    it = 0
    while it < args.iters:
        x, y = next(loader)
        x, y = x.to(device, dtype=half, non_blocking=True), y.to(device, non_blocking=True)
        logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad()
        opt.backward(loss)
        norm = opt.step()
        if norm is None:
            print(f"overflow, loss scale is {opt.scaler.scale:g} now")
            continue
        it += 1
        if it % 2 == 0:
            acc = (logits.argmax(-1) == y).float().mean()
            used = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0
            print(f"{it}: loss {loss:.3f} acc {acc:.2f} norm {norm:.2f} scale {opt.scaler.scale:g} mem {used:.0f}M")
    os.makedirs(args.out, exist_ok=True)
    torch.save({"model": model.state_dict(), **opt.state_dict()}, os.path.join(args.out, "mixer.pt"))


if __name__ == "__main__":
    main()
