#!/usr/bin/env python3
"""Speech recognition with CTC: log-mel features, convolutions, a packed bidirectional LSTM.

The "speech" is synthetic: each letter is a chord of its own with a random duration.
"""
import argparse
import itertools
import json
import os
import random
import string
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

ALPHABET = "-" + string.ascii_lowercase + " "  # "-" is the blank
CHAR2ID = {c: i for i, c in enumerate(ALPHABET)}
N_MELS = 80


def synthesize(root, n_train, n_dev, seed=0):
    rng = np.random.RandomState(seed)
    chords = rng.rand(len(ALPHABET), N_MELS) ** 4 * 6
    words = ["".join(rng.choice(list(string.ascii_lowercase), rng.randint(2, 8))) for _ in range(120)]
    for split, n in (("train", n_train), ("dev", n_dev)):
        os.makedirs(os.path.join(root, split), exist_ok=True)
        manifest = []
        for i in range(n):
            text = " ".join(rng.choice(words, rng.randint(2, 12)))
            frames = [np.repeat(chords[CHAR2ID[c]][None], rng.randint(5, 12), axis=0) for c in text]
            feats = np.concatenate(frames) + rng.randn(sum(map(len, frames)), N_MELS) * 0.5
            path = os.path.join(root, split, f"utt{i:05d}.npy")
            np.save(path, feats.astype(np.float32))
            manifest.append({"path": path, "frames": len(feats), "text": text})
        with open(os.path.join(root, f"{split}.json"), "w") as f:
            json.dump(manifest, f)


class SpeechDataset(Dataset):
    def __init__(self, manifest, augment=False):
        with open(manifest) as f:
            self.items = json.load(f)
        self.augment = augment

    def __len__(self):
        return len(self.items)

    def __getitem__(self, idx):
        item = self.items[idx]
        x = torch.from_numpy(np.load(item["path"]))
        x = (x - x.mean(0)) / (x.std(0) + 1e-5)
        if self.augment:  # a frequency mask and a time mask
            f0 = random.randint(0, N_MELS - 10)
            x[:, f0 : f0 + random.randint(0, 10)] = 0
            t0 = random.randint(0, max(0, len(x) - 30))
            x[t0 : t0 + random.randint(0, 30)] = 0
        return x, torch.tensor([CHAR2ID[c] for c in item["text"]]), item["text"]


def collate(batch):
    batch.sort(key=lambda b: len(b[0]), reverse=True)
    feats, targets, texts = zip(*batch)
    return (
        pad_sequence(feats, batch_first=True),
        torch.tensor([len(f) for f in feats]),
        torch.cat(targets),
        torch.tensor([len(t) for t in targets]),
        texts,
    )


class BucketSampler(Sampler):
    """Batches of utterances of similar length, in a new order every epoch."""

    def __init__(self, lengths, batch_size, bucket_batches=8):
        self.lengths = lengths
        self.batch_size = batch_size
        self.bucket = batch_size * bucket_batches

    def __len__(self):
        return (len(self.lengths) + self.batch_size - 1) // self.batch_size

    def __iter__(self):
        order = list(range(len(self.lengths)))
        random.shuffle(order)
        batches = []
        for i in range(0, len(order), self.bucket):
            pool = sorted(order[i : i + self.bucket], key=self.lengths.__getitem__)
            batches += [pool[j : j + self.batch_size] for j in range(0, len(pool), self.batch_size)]
        random.shuffle(batches)
        return iter(batches)


class Recognizer(nn.Module):
    def __init__(self, hidden=256, layers=3, dropout=0.2):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=(2, 2), padding=1),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(32, 32, 3, stride=(1, 2), padding=1),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
        )
        self.rnn = nn.LSTM(32 * N_MELS // 4, hidden, layers, batch_first=True, bidirectional=True, dropout=dropout)
        self.norm = nn.LayerNorm(2 * hidden)
        self.fc = nn.Linear(2 * hidden, len(ALPHABET))

    def forward(self, x, lengths):
        x = self.conv(x.unsqueeze(1))
        lengths = torch.div(lengths + 1, 2, rounding_mode="floor")
        mask = torch.arange(x.size(2), device=x.device)[None, :] >= lengths.to(x.device)[:, None]
        x = x.masked_fill(mask[:, None, :, None], 0)
        x = x.permute(0, 2, 1, 3).flatten(2)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=True)
        self.rnn.flatten_parameters()
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return F.log_softmax(self.fc(self.norm(out)), dim=-1), lengths


def greedy_decode(log_probs, lengths):
    best = log_probs.argmax(-1).cpu()
    texts = []
    for row, n in zip(best, lengths.tolist()):
        ids = [k for k, _ in itertools.groupby(row[:n].tolist())]
        texts.append("".join(ALPHABET[i] for i in ids if i != 0))
    return texts


def edit_distance(a, b):
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return previous[-1]


def train_epoch(model, loader, ctc, optimizer, device, epoch, args):
    model.train()
    total, seen = 0.0, 0
    for i, (feats, feat_lens, targets, target_lens, _) in enumerate(loader):
        if args.max_batches and i == args.max_batches:
            break
        feats, targets = feats.to(device), targets.to(device)
        log_probs, out_lens = model(feats, feat_lens)
        loss = ctc(log_probs.transpose(0, 1), targets, out_lens, target_lens)
        if torch.isnan(loss) or torch.isinf(loss):
            print("WARNING: loss is not finite, batch skipped", file=sys.stderr)
            continue
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        total += loss.item() * len(feat_lens)
        seen += len(feat_lens)
        if i % args.log_every == 0:
            print(f"epoch {epoch} [{i}/{len(loader)}] frames {feats.size(1)} loss {loss.item():.3f} grad {grad_norm:.2f}")
    return total / max(seen, 1)


@torch.no_grad()
def evaluate(model, loader, ctc, device):
    model.eval()
    losses, char_errors, chars, word_errors, words = [], 0, 0, 0, 0
    for feats, feat_lens, targets, target_lens, texts in loader:
        log_probs, out_lens = model(feats.to(device), feat_lens)
        losses.append(ctc(log_probs.transpose(0, 1), targets.to(device), out_lens, target_lens).item())
        for hyp, ref in zip(greedy_decode(log_probs, out_lens), texts):
            char_errors += edit_distance(hyp, ref)
            chars += len(ref)
            word_errors += edit_distance(hyp.split(), ref.split())
            words += len(ref.split())
    return sum(losses) / len(losses), char_errors / chars, word_errors / words


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/speech")
    parser.add_argument("--exp", default="exp/ctc")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-batches", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--max-norm", type=float, default=400)
    parser.add_argument("--log-every", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    random.seed(1)
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not os.path.exists(os.path.join(args.data, "dev.json")):
        synthesize(args.data, n_train=240, n_dev=24)
    os.makedirs(args.exp, exist_ok=True)

    train_set = SpeechDataset(os.path.join(args.data, "train.json"), augment=True)
    dev_set = SpeechDataset(os.path.join(args.data, "dev.json"))
    sampler = BucketSampler([i["frames"] for i in train_set.items], args.batch_size)
    train_loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate, num_workers=args.workers)
    dev_loader = DataLoader(dev_set, batch_size=args.batch_size, collate_fn=collate)

    model = Recognizer(args.hidden, args.layers).to(device)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    best = float("inf")
    for epoch in range(args.epochs):
        train_loss = train_epoch(model, train_loader, ctc, optimizer, device, epoch, args)
        dev_loss, cer, wer = evaluate(model, dev_loader, ctc, device)
        scheduler.step(dev_loss)
        print(f"epoch {epoch}: train {train_loss:.3f} dev {dev_loss:.3f} CER {cer:.1%} WER {wer:.1%}")
        if wer <= best:
            best = wer
            torch.save({"model": model.state_dict(), "args": vars(args), "wer": wer}, os.path.join(args.exp, "best.pt"))


if __name__ == "__main__":
    main()
