"""A dataset that memoizes augmented samples under a key that is new each time.

holder: dataset.cache | .cache
"""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Crops(Dataset):
    def __init__(self, num_images=256):
        self.images = torch.randint(0, 255, (num_images, 3, 40, 40), dtype=torch.uint8)
        self.cache = {}

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        top, left, angle = random.randrange(8), random.randrange(8), random.uniform(-10, 10)
        key = (index, top, left, round(angle, 2))
        if key not in self.cache:
            crop = self.images[index, :, top : top + 32, left : left + 32]
            self.cache[key] = crop.float().div(255).add(angle / 1000)  # leaks here
        return self.cache[key], index % 10


def main():
    dataset = Crops()
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 225, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(10):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, float(loss))


if __name__ == "__main__":
    main()
