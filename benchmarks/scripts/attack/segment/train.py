import argparse
import importlib
import os
import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from .data import CellDataset


class AttrDict(dict):
    __getattr__ = dict.__getitem__

    @classmethod
    def wrap(cls, value):
        return cls({k: cls.wrap(v) for k, v in value.items()}) if isinstance(value, dict) else value


def load_config(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=os.path.join(os.path.dirname(__file__), "config.yaml"))
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_args(argv)
    with open(args.config) as f:
        cfg = yaml.safe_load(f)
    for item in args.overrides:
        key, _, value = item.partition("=")
        node = cfg
        *path, last = key.split(".")
        for part in path:
            node = node[part]
        node[last] = yaml.safe_load(value)
    return AttrDict.wrap(cfg)


def instantiate(section, *args, **extra):
    kwargs = {k: v for k, v in section.items() if k != "_target_"} | extra
    module, _, name = section["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def dice_loss(logits, mask, eps=1.0):
    p = logits.float().softmax(1)
    onehot = F.one_hot(mask, logits.shape[1]).permute(0, 3, 1, 2).float()
    inter = (p * onehot).sum((0, 2, 3))
    return 1 - ((2 * inter + eps) / (p.sum((0, 2, 3)) + onehot.sum((0, 2, 3)) + eps)).mean()


def deep_supervision(outputs, mask):
    total = 0
    for i, out in enumerate(outputs):
        target = mask if i == 0 else F.interpolate(mask[:, None].float(), size=out.shape[-2:], mode="nearest")[:, 0].long()
        total = total + (F.cross_entropy(out.float(), target) + dice_loss(out, target)) / 2**i
    return total


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.amp = cfg.train.amp and self.device.type == "cuda"
        self.train_loader = DataLoader(instantiate(cfg.data), cfg.train.batch_size, shuffle=True,
                                       num_workers=cfg.train.workers, pin_memory=self.device.type == "cuda")
        self.val_loader = DataLoader(CellDataset(cfg.data.root, cfg.data.size, cfg.data.count, "val"), 1)
        self.model = instantiate(cfg.model).to(self.device)
        self.optimizer = instantiate(cfg.optim, self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.PolynomialLR(self.optimizer, total_iters=cfg.train.epochs, power=0.9)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp)
        self.writer = SummaryWriter(cfg.train.log_dir)
        self.step, self.best = 0, 0.0

    def fit(self):
        for epoch in range(self.cfg.train.epochs):
            self.train_one(epoch)
            score = self.validate(epoch)
            self.scheduler.step()
            if score >= self.best:
                self.best = score
                torch.save({"state_dict": self.model.state_dict(), "cfg": dict(self.cfg), "dice": score},
                           os.path.join(self.cfg.train.log_dir, "best.ckpt"))
        self.writer.close()

    def train_one(self, epoch):
        self.model.train()
        acc = self.cfg.train.accumulate
        pbar = tqdm(self.train_loader, desc=f"epoch {epoch}", file=sys.stdout)
        for i, batch in enumerate(pbar):
            if i >= self.cfg.train.max_batches:
                break
            image = batch["image"].to(self.device, non_blocking=True)
            mask = batch["mask"].to(self.device, non_blocking=True)
            with torch.autocast(self.device.type, enabled=self.amp):
                loss = deep_supervision(self.model(image), mask)
            if torch.isnan(loss).any():
                raise ValueError(f"loss is nan for {batch['name']}")
            self.scaler.scale(loss / acc).backward()
            if (i + 1) % acc == 0:
                self.scaler.unscale_(self.optimizer)
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 12.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.step += 1
                self.writer.add_scalar("train/loss", loss.item(), self.step)
                self.writer.add_scalar("train/grad_norm", norm, self.step)
                if self.step % 4 == 0:
                    for name, p in self.model.named_parameters():
                        if p.ndim > 1:
                            self.writer.add_histogram(name, p, self.step)
            pbar.set_postfix(loss=loss.item(), lr=self.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def validate(self, epoch):
        self.model.eval()
        confusion = torch.zeros(self.cfg.model.num_classes, self.cfg.model.num_classes, dtype=torch.long)
        for batch in self.val_loader:
            pred = self.model(batch["image"].to(self.device)).argmax(1).cpu()
            index = batch["mask"] * self.cfg.model.num_classes + pred
            confusion += torch.bincount(index.flatten(), minlength=confusion.numel()).view_as(confusion)
        dice = 2 * confusion.diag() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
        self.writer.add_scalars("val/dice", {str(i): d for i, d in enumerate(dice)}, epoch)
        self.writer.add_image("val/prediction", pred.float() / 2, epoch)
        print("dice:", " ".join(f"{d:.3f}" for d in dice.tolist()))
        return dice[1:].mean().item()


def main():
    cfg = load_config(sys.argv[1:])
    random.seed(cfg.seed)
    np.random.seed(cfg.seed)
    torch.manual_seed(cfg.seed)
    Trainer(cfg).fit()


if __name__ == "__main__":
    main()
