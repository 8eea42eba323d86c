"""A one-stage detector on images with a varying number of boxes. Targets are lists, not tensors."""
import argparse
import os
import pickle
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def box_iou(a, b):
    lt = torch.max(a[:, None, :2], b[None, :, :2])
    rb = torch.min(a[:, None, 2:], b[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    return inter / (area_a[:, None] + area_b[None] - inter + 1e-6)


def nms(boxes, scores, threshold):
    keep = []
    order = scores.argsort(descending=True)
    while order.numel() > 0:
        i = order[0]
        keep.append(i.item())
        if order.numel() == 1:
            break
        iou = box_iou(boxes[i][None], boxes[order[1:]])[0]
        order = order[1:][iou <= threshold]
    return keep


class ToyBoxes(Dataset):
    COLOURS = np.array([[220, 40, 40], [40, 200, 60], [60, 80, 230]])

    def __init__(self, root, split, count, size):
        os.makedirs(root, exist_ok=True)
        path = os.path.join(root, f"{split}_{size}.pkl")
        if not os.path.exists(path):
            rng = np.random.default_rng(0 if split == "train" else 1)
            data = []
            for _ in range(count):
                img = rng.integers(90, 140, (size, size, 3))
                boxes, labels = [], []
                for _ in range(rng.integers(0, 9)):  # an image can be empty
                    w, h = rng.integers(size // 10, size // 3, 2)
                    x, y = rng.integers(0, size - w), rng.integers(0, size - h)
                    c = int(rng.integers(3))
                    img[y : y + h, x : x + w] = self.COLOURS[c] + rng.integers(-20, 20, 3)
                    boxes.append([x, y, x + w, y + h])
                    labels.append(c)
                data.append((img.clip(0, 255).astype(np.uint8), boxes, labels))
            with open(path, "wb") as f:
                pickle.dump(data, f)
        with open(path, "rb") as f:
            self.data = pickle.load(f)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        img, boxes, labels = self.data[i]
        x = torch.from_numpy(img).permute(2, 0, 1).float() / 255
        target = {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "image_id": i,
        }
        return x, target


def collate_fn(batch):
    return tuple(zip(*batch))


def conv(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.SiLU(inplace=True))


class Detector(nn.Module):
    strides = (8, 16)

    def __init__(self, width, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.c3 = nn.Sequential(conv(3, width, 2), conv(width, width), conv(width, 2 * width, 2), conv(2 * width, 2 * width, 2))
        self.c4 = nn.Sequential(conv(2 * width, 4 * width, 2), conv(4 * width, 4 * width))
        self.lateral3 = nn.Conv2d(2 * width, 2 * width, 1)
        self.lateral4 = nn.Conv2d(4 * width, 2 * width, 1)
        self.tower = nn.Sequential(conv(2 * width, 2 * width), conv(2 * width, 2 * width))
        self.cls = nn.Conv2d(2 * width, num_classes, 3, padding=1)
        self.reg = nn.Conv2d(2 * width, 4, 3, padding=1)
        nn.init.constant_(self.cls.bias, -3.0)

    def forward(self, images, targets=None):
        x = torch.stack(images)
        c3 = self.c3(x)
        c4 = self.c4(c3)
        p4 = self.lateral4(c4)
        p3 = self.lateral3(c3) + F.interpolate(p4, scale_factor=2, mode="nearest")
        logits, deltas, points, scales = [], [], [], []
        for level, stride in zip((p3, p4), self.strides):
            h = self.tower(level)
            n, _, height, width = h.shape
            logits.append(self.cls(h).permute(0, 2, 3, 1).reshape(n, -1, self.num_classes))
            deltas.append(self.reg(h).permute(0, 2, 3, 1).reshape(n, -1, 4).exp() * stride)
            ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            points.append((torch.stack([xs, ys], -1).reshape(-1, 2).to(x.device) + 0.5) * stride)
            scales.append(torch.full((height * width,), float(stride), device=x.device))
        logits, deltas = torch.cat(logits, 1), torch.cat(deltas, 1)
        points, scales = torch.cat(points), torch.cat(scales)
        boxes = torch.cat([points - deltas[..., :2], points + deltas[..., 2:]], -1)
        if self.training:
            return self.losses(logits, boxes, points, scales, targets)
        return self.postprocess(logits, boxes, x.shape[-1])

    def losses(self, logits, boxes, points, scales, targets):
        cls_loss, box_loss, total_pos = logits.sum() * 0, logits.sum() * 0, 0
        for i, target in enumerate(targets):
            wanted = torch.zeros_like(logits[i])
            if len(target["boxes"]) > 0:
                gt = target["boxes"]
                inside = (points[:, None] > gt[None, :, :2]).all(-1) & (points[:, None] < gt[None, :, 2:]).all(-1)
                area = ((gt[:, 2] - gt[:, 0]) * (gt[:, 3] - gt[:, 1]))[None].repeat(len(points), 1)
                area[~inside] = float("inf")
                smallest, which = area.min(1)
                pos = torch.isfinite(smallest)
                if pos.any():
                    idx = pos.nonzero(as_tuple=True)[0]
                    matched = which[idx]
                    wanted[idx, target["labels"][matched]] = 1.0
                    iou = box_iou(boxes[i][idx], gt).gather(1, matched[:, None])[:, 0]
                    box_loss = box_loss + (1 - iou).sum()
                    total_pos += int(pos.sum())
            p = logits[i].sigmoid()
            ce = F.binary_cross_entropy_with_logits(logits[i], wanted, reduction="none")
            pt = p * wanted + (1 - p) * (1 - wanted)
            cls_loss = cls_loss + (ce * (1 - pt) ** 2 * (0.25 * wanted + 0.75 * (1 - wanted))).sum()
        norm = max(total_pos, 1)
        return {"loss_cls": cls_loss / norm, "loss_box": box_loss / norm}

    def postprocess(self, logits, boxes, size, score_thresh=0.02, top=200):
        results = []
        for lg, bx in zip(logits.sigmoid(), boxes.clamp(0, size)):
            out = {"boxes": [], "scores": [], "labels": []}
            for c in range(self.num_classes):
                keep = lg[:, c] > score_thresh
                if keep.sum() == 0:
                    continue
                scores, b = lg[keep, c], bx[keep]
                scores, order = scores.topk(min(top, len(scores)))
                b = b[order]
                picked = nms(b, scores, 0.5)
                out["boxes"].append(b[picked])
                out["scores"].append(scores[picked])
                out["labels"] += [c] * len(picked)
            out["boxes"] = torch.cat(out["boxes"]) if out["boxes"] else boxes.new_zeros(0, 4)
            out["scores"] = torch.cat(out["scores"]) if out["scores"] else boxes.new_zeros(0)
            results.append(out)
        return results


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    hits = wanted = found = 0
    for images, targets in loader:
        outputs = model([img.to(device) for img in images])
        for out, target in zip(outputs, targets):
            wanted += len(target["boxes"])
            found += len(out["boxes"])
            if len(out["boxes"]) == 0 or len(target["boxes"]) == 0:
                continue
            iou = box_iou(out["boxes"].cpu(), target["boxes"])
            labels = torch.tensor(out["labels"])
            for j, label in enumerate(target["labels"].tolist()):
                if ((iou[:, j] > 0.5) & (labels == label)).any():
                    hits += 1
    print(f"recall {hits / max(wanted, 1):.3f}, {found} boxes found, {wanted} wanted")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data-path", default="data/boxes")
    p.add_argument("--output-dir", default="out/detector")
    p.add_argument("--size", type=int, default=160)
    p.add_argument("--width", type=int, default=24)
    p.add_argument("-b", "--batch-size", type=int, default=4)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--images", type=int, default=40)
    p.add_argument("--lr", type=float, default=2e-3)
    args = p.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    train_set = ToyBoxes(args.data_path, "train", args.images, args.size)
    val_set = ToyBoxes(args.data_path, "val", 8, args.size)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=collate_fn)
    val_loader = DataLoader(val_set, 1, collate_fn=collate_fn)
    model = Detector(args.width, 3).to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=args.lr, momentum=0.9, weight_decay=5e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for epoch in range(args.epochs):
        model.train()
        for step, (images, targets) in enumerate(train_loader):
            begin = time.time()
            images = [img.to(device) for img in images]
            targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
            loss_dict = model(images, targets)
            losses = sum(loss_dict.values())
            loss_value = losses.item()
            if not np.isfinite(loss_value):
                raise SystemExit(f"Loss is {loss_value}, stopping training")
            optimizer.zero_grad()
            losses.backward()
            torch.nn.utils.clip_grad_norm_(params, 10.0)
            optimizer.step()
            warmup.step()
            if step % 5 == 0:
                parts = " ".join(f"{k} {v.item():.3f}" for k, v in loss_dict.items())
                print(f"epoch {epoch} [{step}/{len(train_loader)}] {parts} {time.time() - begin:.2f}s")
        evaluate(model, val_loader, device)
        os.makedirs(args.output_dir, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                   os.path.join(args.output_dir, f"model_{epoch}.pth"))


if __name__ == "__main__":
    main()
