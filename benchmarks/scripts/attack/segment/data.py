from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset


class CellDataset(Dataset):
    """Round cells with a nucleus, on a noisy ground."""

    def __init__(self, root, size, count, split="train"):
        self.folder = Path(root) / f"{split}_{size}"
        self.augment = split == "train"
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            rng = np.random.default_rng(0 if split == "train" else 1)
            yy, xx = np.mgrid[:size, :size]
            for i in range(count if split == "train" else count // 8):
                img, mask = rng.normal(0.3, 0.08, (size, size)), np.zeros((size, size), np.uint8)
                for _ in range(rng.integers(2, 7)):
                    cy, cx, r = *rng.uniform(0, size, 2), rng.uniform(size / 16, size / 6)
                    d = np.hypot(yy - cy, xx - cx)
                    img[d < r] += 0.25
                    img[d < r / 3] += 0.3
                    mask[d < r] = 1
                    mask[d < r / 3] = 2
                np.savez(self.folder / f"{i:04d}.npz", img=img.astype(np.float32), mask=mask)
        self.files = sorted(self.folder.glob("*.npz"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        f = np.load(self.files[i])
        img, mask = f["img"], f["mask"]
        if self.augment:
            k = np.random.randint(4)
            img, mask = np.rot90(img, k), np.rot90(mask, k)
        return {
            "image": torch.from_numpy(img.copy())[None],
            "mask": torch.from_numpy(mask.copy()).long(),
            "name": self.files[i].stem,
        }
