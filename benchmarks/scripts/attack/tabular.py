#!/usr/bin/env python
"""Churn prediction from a csv file: embeddings for categories, standardized numbers, early stopping, k folds."""
import argparse
import csv
import logging
import os
import random

import numpy as np
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import LabelEncoder, StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

logger = logging.getLogger("churn")
NUMERIC = ["age", "tenure", "charges", "calls", "usage", "discount"]
CATEGORICAL = {"plan": 5, "region": 60, "channel": 8, "device": 200, "agent": 900}


def make_csv(path, rows=6000):
    rng = random.Random(17)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", newline="") as f:
        w = csv.writer(f)
        w.writerow(["id", *NUMERIC, *CATEGORICAL, "churned"])
        for i in range(rows):
            numbers = [rng.gauss(0, 1) for _ in NUMERIC]
            cats = [int(rng.betavariate(0.8, 3) * n) for n in CATEGORICAL.values()]
            score = numbers[1] * -1.2 + numbers[3] + (cats[0] == 2) * 1.5 + (cats[1] % 7 == 0) - 1.8
            y = int(rng.random() < 1 / (1 + 2.718 ** -score))
            numbers = ["" if rng.random() < 0.03 else f"{v:.4f}" for v in numbers]
            w.writerow([i, *numbers, *(f"{k}_{c}" for k, c in zip(CATEGORICAL, cats)), y])


def read_csv(path):
    with open(path) as f:
        rows = list(csv.DictReader(f))
    num = np.array([[float(r[c]) if r[c] else np.nan for c in NUMERIC] for r in rows])
    num = np.where(np.isnan(num), np.nanmedian(num, axis=0), num)
    cat = np.stack([LabelEncoder().fit_transform([r[c] for r in rows]) for c in CATEGORICAL], axis=1)
    return num, cat, np.array([int(r["churned"]) for r in rows])


class GatedResidual(nn.Module):
    def __init__(self, d, dropout):
        super().__init__()
        self.norm = nn.BatchNorm1d(d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, 2 * d)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        h = self.drop(torch.relu(self.fc1(self.norm(x))))
        return x + nn.functional.glu(self.fc2(h))


class TabularNet(nn.Module):
    def __init__(self, cards, n_num, width, depth, dropout):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(c, min(50, (c + 1) // 2)) for c in cards)
        d = sum(e.embedding_dim for e in self.embeddings) + n_num
        self.inp = nn.Linear(d, width)
        self.blocks = nn.Sequential(*[GatedResidual(width, dropout) for _ in range(depth)])
        self.out = nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, num, cat):
        e = [emb(cat[:, i]) for i, emb in enumerate(self.embeddings)]
        return self.out(self.blocks(self.inp(torch.cat([*e, num], 1)))).squeeze(1)


class EarlyStopping:
    def __init__(self, patience, path):
        self.patience, self.path = patience, path
        self.best, self.bad, self.stop = None, 0, False

    def __call__(self, loss, model):
        if self.best is None or loss < self.best - 1e-4:
            logger.info("validation loss %s -> %.5f, saving", "-" if self.best is None else f"{self.best:.5f}", loss)
            self.best, self.bad = loss, 0
            torch.save(model.state_dict(), self.path)
        else:
            self.bad += 1
            self.stop = self.bad >= self.patience


def predict(model, loader, device):
    model.eval()
    out = []
    with torch.no_grad():
        for num, cat, _ in loader:
            out.append(torch.sigmoid(model(num.to(device), cat.to(device))).cpu().numpy())
    return np.concatenate(out)


def run_fold(fold, num, cat, y, train_idx, val_idx, device, args):
    scaler = StandardScaler().fit(num[train_idx])
    tensors = (torch.tensor(scaler.transform(num), dtype=torch.float32), torch.tensor(cat), torch.tensor(y, dtype=torch.float32))
    train, val = (TensorDataset(*(t[idx] for t in tensors)) for idx in (train_idx, val_idx))
    weights = np.where(y[train_idx] == 1, 1 / y[train_idx].mean(), 1 / (1 - y[train_idx].mean()))
    sampler = WeightedRandomSampler(torch.as_tensor(weights), len(train_idx))
    train_loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, 4 * args.batch_size)

    model = TabularNet(cat.max(0) + 1, num.shape[1], args.width, args.depth, args.dropout).to(device)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr, weight_decay=1e-5)
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, args.lr / 10, args.lr, step_size_up=20)
    stopper = EarlyStopping(args.patience, os.path.join(args.model_dir, f"fold{fold}.pt"))
    for epoch in range(args.max_epochs):
        model.train()
        losses = []
        for num_b, cat_b, y_b in train_loader:
            num_b, cat_b, y_b = num_b.to(device), cat_b.to(device), y_b.to(device)
            optimizer.zero_grad()
            loss = criterion(model(num_b, cat_b), y_b)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        prob = predict(model, val_loader, device)
        val_y = y[val_idx]
        val_loss = -np.mean(val_y * np.log(prob + 1e-7) + (1 - val_y) * np.log(1 - prob + 1e-7))
        logger.info("fold %d epoch %d train %.4f val %.4f auc %.4f", fold, epoch, np.mean(losses), val_loss,
                    roc_auc_score(val_y, prob))
        stopper(val_loss, model)
        if stopper.stop:
            logger.info("early stop")
            break
    model.load_state_dict(torch.load(stopper.path))
    return predict(model, val_loader, device)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--csv", default="data/churn/churn.csv")
    ap.add_argument("--model-dir", default="out/churn")
    ap.add_argument("--folds", type=int, default=2)
    ap.add_argument("--max-epochs", type=int, default=6)
    ap.add_argument("--patience", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=512)
    ap.add_argument("--width", type=int, default=256)
    ap.add_argument("--depth", type=int, default=3)
    ap.add_argument("--dropout", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
    torch.manual_seed(0)
    np.random.seed(0)
    if not os.path.exists(args.csv):
        make_csv(args.csv)
    os.makedirs(args.model_dir, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    num, cat, y = read_csv(args.csv)
    oof = np.zeros(len(y))
    for fold, (tr, va) in enumerate(StratifiedKFold(args.folds, shuffle=True, random_state=0).split(num, y)):
        oof[va] = run_fold(fold, num, cat, y, tr, va, device, args)
    logger.info("out of fold: auc %.4f, ap %.4f", roc_auc_score(y, oof), average_precision_score(y, oof))


if __name__ == "__main__":
    main()
