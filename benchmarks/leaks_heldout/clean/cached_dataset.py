"""A dataset that decodes each picture once, in the first epoch, and keeps it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, num_pictures):
        self.num_pictures = num_pictures
        self.decoded = {}

    def __len__(self):
        return self.num_pictures

    def __getitem__(self, index):
        if index not in self.decoded:
            generator = torch.Generator().manual_seed(index)
            self.decoded[index] = torch.randn(3, 32, 32, generator=generator)
        return self.decoded[index], index % 7


def main():
    train = DataLoader(Pictures(800), batch_size=16, shuffle=True)
    valid = DataLoader(Pictures(160), batch_size=32)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(6):
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in valid)
        print(epoch, right)


if __name__ == "__main__":
    main()
