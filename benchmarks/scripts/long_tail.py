"""Classify documents whose lengths are long-tailed: most are short, a few are a hundred times longer.

Batches are padded to their longest document. An epoch is a few thousand steps.
"""
import argparse
import json
import os
import time

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

PAD, CLS = 0, 1
VOCAB = 4000


def write_documents(path, n, seed, median, sigma, longest):
    """One json line per document; token k of a document of class c is drawn around c's topics."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(median), sigma, n)).astype(int).clip(4, longest)
    with open(path, "w") as f:
        for length in lengths:
            label = int(rng.integers(4))
            topic = rng.random(length) < 0.15
            common = np.minimum(rng.zipf(1.3, length) + 1, VOCAB // 2)
            special = VOCAB // 2 + label * 400 + rng.integers(0, 400, length)
            ids = np.where(topic, special, common)
            f.write(json.dumps({"ids": ids.tolist(), "label": label}) + "\n")


class Documents(Dataset):
    def __init__(self, path, max_length):
        self.rows = []
        with open(path) as f:
            for line in f:
                row = json.loads(line)
                self.rows.append(([CLS] + row["ids"][: max_length - 1], row["label"]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), PAD, dtype=torch.long)
    for i, (row, _) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return {"ids": ids, "mask": ids != PAD, "labels": torch.tensor([label for _, label in rows])}


class Layer(nn.Module):
    def __init__(self, d, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * d, d))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) * (d // self.heads) ** -0.5
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        attn = self.dropout(scores.softmax(-1))
        x = x + self.dropout(self.out((attn @ v).transpose(1, 2).reshape(b, t, d)))
        return x + self.dropout(self.ff(self.norm2(x)))


class Classifier(nn.Module):
    def __init__(self, d, layers, heads, max_length, dropout=0.1):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.pos = nn.Embedding(max_length, d)
        self.layers = nn.ModuleList(Layer(d, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 4)

    def forward(self, ids, mask):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x)[:, 0])


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = total = 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        correct += (model(batch["ids"], batch["mask"]).argmax(-1) == batch["labels"]).sum().item()
        total += len(batch["labels"])
    model.train()
    return correct / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", default="data/documents")
    parser.add_argument("--output_dir", default="out/documents")
    parser.add_argument("--num_documents", type=int, default=17600)
    parser.add_argument("--median_length", type=float, default=20)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--d_model", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max_steps", type=int, default=300, help="0 for a whole epoch")
    parser.add_argument("--eval_every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    os.makedirs(args.data_dir, exist_ok=True)
    os.makedirs(args.output_dir, exist_ok=True)
    name = f"{args.num_documents}_{args.median_length:g}_{args.sigma:g}"
    train_file = os.path.join(args.data_dir, f"train_{name}.jsonl")
    test_file = os.path.join(args.data_dir, f"test_{name}.jsonl")
    if not os.path.exists(test_file):
        print("writing documents...")
        write_documents(train_file, args.num_documents, 1, args.median_length, args.sigma, 4000)
        write_documents(test_file, 400, 2, args.median_length, args.sigma, 4000)

    train_set = Documents(train_file, args.max_length)
    test_set = Documents(test_file, args.max_length)
    lengths = np.array([len(ids) for ids, _ in train_set.rows])
    print("document lengths: median %d, 90%% %d, 99%% %d, max %d" % (*np.percentile(lengths, [50, 90, 99]), lengths.max()))
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=2 * args.batch_size, collate_fn=collate)

    model = Classifier(args.d_model, args.layers, args.heads, args.max_length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=100)
    criterion = nn.CrossEntropyLoss()

    total = args.max_steps or len(train_loader)
    start, tokens, running = time.time(), 0, 0.0
    bar = tqdm(train_loader, total=total, mininterval=2)
    for step, batch in enumerate(bar, 1):
        batch = {k: v.to(device) for k, v in batch.items()}
        loss = criterion(model(batch["ids"], batch["mask"]), batch["labels"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        tokens += batch["mask"].sum().item()
        running = 0.98 * running + 0.02 * loss.item()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{running:.3f}", tok_s=f"{tokens / (time.time() - start):.0f}")
        if step % args.eval_every == 0 or step == total:
            print(f"step {step}: accuracy {evaluate(model, test_loader, device):.3f}")
            torch.save(model.state_dict(), os.path.join(args.output_dir, "model.pt"))
        if step >= total:
            break


if __name__ == "__main__":
    main()
