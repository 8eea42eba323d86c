"""
Knowledge distillation for keyword spotting: train a teacher, keep its best copy, freeze it, then
teach a small student with soft targets and matched hidden features.

    python distill.py --stage both
"""
import argparse
import copy
import os
from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def get_data(root, n=1200, frames=64, mels=40, classes=10):
    os.makedirs(root, exist_ok=True)
    path = os.path.join(root, "keywords.npy")
    if not os.path.exists(path):
        rng = np.random.default_rng(4)
        proto = np.cumsum(rng.normal(0, 0.4, (classes, frames, mels)), axis=1)
        label = rng.integers(0, classes, n)
        shift = rng.integers(-8, 8, n)
        x = np.stack([np.roll(proto[c], s, axis=0) for c, s in zip(label, shift)])
        x += rng.normal(0, 2.0, x.shape)
        np.save(path, {"x": x.astype(np.float32), "y": label}, allow_pickle=True)
    blob = np.load(path, allow_pickle=True).item()
    return torch.from_numpy(blob["x"]), torch.from_numpy(blob["y"])


class Net(nn.Module):
    def __init__(self, mels, width, depth, classes=10):
        super().__init__()
        self.stem = nn.Conv1d(mels, width, 5, padding=2)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.1, batch_first=True,
                                           norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        h = self.stem(x.transpose(1, 2)).transpose(1, 2)
        h = self.encoder(h)
        return self.head(h.mean(1))


class FeatureTap:
    """Remembers the output of a layer at every forward."""

    def __init__(self, module):
        self.value = None
        self.handle = module.register_forward_hook(partial(self.save))

    def save(self, module, inputs, output):
        self.value = output


def kd_loss(student, teacher, labels, T, alpha):
    soft = F.kl_div(F.log_softmax(student / T, -1), F.log_softmax(teacher / T, -1), log_target=True, reduction="batchmean")
    return alpha * T * T * soft + (1 - alpha) * F.cross_entropy(student, labels)


def accuracy(model, x, y, device, batch=200):
    model.eval()
    with torch.inference_mode():
        right = sum((model(a.to(device)).argmax(1).cpu() == b).sum().item() for a, b in zip(x.split(batch), y.split(batch)))
    model.train()
    return right / len(y)


def fit(model, data, device, args, epochs, teacher=None):
    (x, y), (xv, yv) = data
    groups = list(model.parameters())
    project = None
    if teacher is not None:
        tap_t, tap_s = FeatureTap(teacher.encoder), FeatureTap(model.encoder)
        project = nn.Linear(model.head.in_features, teacher.head.in_features).to(device)
        groups += list(project.parameters())
    optimizer = torch.optim.Adam(groups, lr=args.lr)
    best_acc, best_model = -1.0, None
    for epoch in range(epochs):
        for i, idx in enumerate(torch.randperm(len(x)).split(args.batch_size)):
            if i >= args.batches_per_epoch:
                break
            xb, yb = x[idx].to(device), y[idx].to(device)
            logits = model(xb)
            if teacher is None:
                loss = F.cross_entropy(logits, yb)
            else:
                with torch.no_grad():
                    t_logits = teacher(xb)
                loss = kd_loss(logits, t_logits, yb, args.temperature, args.alpha)
                loss = loss + args.beta * F.mse_loss(project(tap_s.value), tap_t.value)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc = accuracy(model, xv, yv, device)
        print(f"{'student' if teacher is not None else 'teacher'} epoch {epoch}: loss {loss.item():.4f} acc {acc:.3f}")
        if acc > best_acc:
            best_acc = acc
            best_model = copy.deepcopy(model)
    return best_model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", choices=["teacher", "student", "both"], default="both")
    parser.add_argument("--data", default="data/keywords")
    parser.add_argument("--save", default="out/distill")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches-per-epoch", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--teacher-width", type=int, default=128)
    parser.add_argument("--student-width", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--alpha", type=float, default=0.7)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=5e-4)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")
    os.makedirs(args.save, exist_ok=True)
    teacher_path = os.path.join(args.save, "teacher.pt")
    x, y = get_data(args.data)
    data = (x[:1000], y[:1000]), (x[1000:], y[1000:])

    teacher = Net(x.shape[-1], args.teacher_width, depth=4).to(device)
    if args.stage in ("teacher", "both"):
        teacher = fit(teacher, data, device, args, args.epochs)
        torch.save(teacher.state_dict(), teacher_path)
    else:
        teacher.load_state_dict(torch.load(teacher_path, map_location=device))
    if args.stage == "teacher":
        return

    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad = False
    student = Net(x.shape[-1], args.student_width, depth=2).to(device)
    student = fit(student, data, device, args, args.epochs, teacher)
    torch.save(student.state_dict(), os.path.join(args.save, "student.pt"))
    ratio = sum(p.numel() for p in teacher.parameters()) / sum(p.numel() for p in student.parameters())
    print(f"the student is {ratio:.1f} times smaller")


if __name__ == "__main__":
    main()
