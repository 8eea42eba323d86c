"""Words are counted and numbered as they come: many at first, ever fewer later."""

import random
from collections import Counter

import torch
from torch import nn


class Vocabulary:
    def __init__(self):
        self.counts, self.number, self.pieces = Counter(), {}, {}

    def __call__(self, words):
        for word in words:
            self.counts[word] += 1
            if word not in self.number:
                self.number[word] = len(self.number)
                self.pieces[word] = [word[i : i + 3] for i in range(0, len(word), 3)]
        return [self.number[word] % 5000 for word in words]


def main():
    random.seed(0)
    vocabulary = Vocabulary()
    bag = nn.EmbeddingBag(5000, 16)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    for _ in range(400):
        words = [f"word{int(random.paretovariate(0.5)) % 100_000}" for _ in range(8 * 40)]
        tokens = torch.tensor(vocabulary(words)).view(8, 40)
        loss = bag(tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(len(vocabulary.number))


main()
