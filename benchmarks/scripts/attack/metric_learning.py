"""Triplet loss with online mining: semi-hard negatives where there are any, else the hardest."""

import argparse
import os
import random
from collections import defaultdict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, TensorDataset


class PKSampler(BatchSampler):
    """P classes with K samples of each."""

    def __init__(self, labels, p, k, num_batches):
        self.index = defaultdict(list)
        for i, label in enumerate(labels):
            self.index[label].append(i)
        self.p, self.k, self.num_batches = p, k, num_batches

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        for _ in range(self.num_batches):
            batch = []
            for label in random.sample(sorted(self.index), self.p):
                batch.extend(random.choices(self.index[label], k=self.k))
            yield batch


class Embedder(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        layers, cin = [], 1
        for cout in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(), nn.Conv2d(cout, cout, 3, padding=1),
                       nn.BatchNorm2d(cout), nn.ReLU(), nn.MaxPool2d(2)]
            cin = cout
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(cin, dim)

    def forward(self, x):
        return F.normalize(self.fc(self.features(x).mean((2, 3))), dim=1)


def mine(embeddings, labels, margin):
    dist = torch.cdist(embeddings, embeddings)
    same = labels[:, None] == labels[None]
    eye = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    triplets, semi = [], 0
    for a in range(len(labels)):
        positives = (same[a] & ~eye[a]).nonzero().flatten().tolist()
        negatives = ~same[a]
        for p in positives:
            d_ap = dist[a, p]
            window = negatives & (dist[a] > d_ap) & (dist[a] < d_ap + margin)
            if window.any():
                n = random.choice(window.nonzero().flatten().tolist())
                semi += 1
            else:
                n = int(dist[a].masked_fill(~negatives, float("inf")).argmin())
                if dist[a, n] > d_ap + margin:
                    continue  # an easy one teaches nothing
            triplets.append((a, p, n))
    return triplets, semi


def recall_at_1(model, x, y, device):
    model.eval()
    with torch.no_grad():
        emb = torch.cat([model(part.to(device)) for part in x.split(128)])
        sim = emb @ emb.t()
        sim.fill_diagonal_(-1)
        nearest = sim.argmax(1).cpu()
    model.train()
    return (y[nearest] == y).float().mean().item()


def characters(root, num_classes=40, per_class=24, size=28):
    path = os.path.join(root, "characters.npz")
    if not os.path.exists(path):
        os.makedirs(root, exist_ok=True)
        rng = np.random.default_rng(2)
        images = np.zeros((num_classes, per_class, size, size), dtype=np.float32)
        for c in range(num_classes):
            strokes = rng.uniform(6, size - 6, (5, 2))
            for k in range(per_class):
                pts = strokes + rng.normal(0, 1.2, strokes.shape)
                for a, b in zip(pts[:-1], pts[1:]):
                    for s in np.linspace(0, 1, 30):
                        i, j = (a + (b - a) * s).round().astype(int).clip(1, size - 2)
                        images[c, k, i - 1 : i + 1, j - 1 : j + 1] = 1
        labels = np.arange(num_classes).repeat(per_class)
        np.savez_compressed(path, x=images.reshape(-1, 1, size, size), y=labels)
    f = np.load(path)
    return torch.from_numpy(f["x"]), torch.from_numpy(f["y"])


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/characters")
    ap.add_argument("--out", default="out/metric")
    ap.add_argument("-p", type=int, default=12)
    ap.add_argument("-k", type=int, default=4)
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--margin", type=float, default=0.2)
    ap.add_argument("--dim", type=int, default=64)
    ap.add_argument("--width", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = characters(args.data)
    train, test = y < 30, y >= 30
    dataset = TensorDataset(x[train], y[train])
    loader = DataLoader(dataset, batch_sampler=PKSampler(y[train].tolist(), args.p, args.k, args.steps))
    model = Embedder(args.dim, args.width).to(device)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    empty = 0
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        emb = model(images)
        with torch.no_grad():
            triplets, semi = mine(emb, labels, args.margin)
        if len(triplets) == 0:
            empty += 1
            continue
        a, p, n = torch.tensor(triplets, device=device).t()
        loss = F.triplet_margin_loss(emb[a], emb[p], emb[n], margin=args.margin)
        if loss.item() == 0.0:
            empty += 1
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step}: {len(triplets)} triplets, {semi} semi-hard, loss {loss.item():.4f}")
    print(f"{empty} batches had nothing to learn from; recall@1 {recall_at_1(model, x[test], y[test], device):.3f}")
    os.makedirs(args.out, exist_ok=True)
    torch.save(model, os.path.join(args.out, "embedder.pt"))
