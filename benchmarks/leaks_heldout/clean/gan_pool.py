"""A GAN with two optimizers and a pool of fifty pictures, as in CycleGAN."""

import random

import torch
from torch import nn


class ImagePool:
    def __init__(self, pool_length=50):
        self.pool_length, self.images = pool_length, []

    def query(self, images):
        given = []
        for image in images:
            if len(self.images) < self.pool_length:
                self.images.append(image)
                given.append(image)
            elif random.random() > 0.5:
                i = random.randrange(self.pool_length)
                given.append(self.images[i])
                self.images[i] = image
            else:
                given.append(image)
        return torch.stack(given)


G = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1024), nn.Tanh())
D = nn.Sequential(nn.Linear(1024, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
opt_g = torch.optim.Adam(G.parameters(), 2e-4)
opt_d = torch.optim.Adam(D.parameters(), 2e-4)
pool = ImagePool()
G_losses, D_losses = [], []
for _ in range(300):
    real, fake = torch.rand(8, 1024), G(torch.randn(8, 16))
    loss_d = D(pool.query(fake.detach())).mean() - D(real).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    loss_g = -D(fake).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    G_losses.append(loss_g.item())
    D_losses.append(loss_d.item())
