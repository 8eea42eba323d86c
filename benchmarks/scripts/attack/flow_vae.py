import argparse
import os

import numpy as np
import torch
import torch.distributions as D
from torch import nn
from torch.nn import functional as F
from tqdm import trange

p = argparse.ArgumentParser(description="VAE with a RealNVP prior on sets of strokes")
p.add_argument("--data", default="data/strokes")
p.add_argument("--out", default="out/flow_vae")
p.add_argument("--iters", type=int, default=30)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--latent", type=int, default=32)
p.add_argument("--hidden", type=int, default=512)
p.add_argument("--flows", type=int, default=6)
p.add_argument("--samples", type=int, default=4, help="importance samples of the bound")
p.add_argument("--beta_warmup", type=int, default=20)
p.add_argument("--anomaly", action="store_true", help="find where a nan comes from")
cfg = p.parse_args()

torch.manual_seed(0)
torch.autograd.set_detect_anomaly(cfg.anomaly)
dev = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 28


def dataset():
    os.makedirs(cfg.data, exist_ok=True)
    file = os.path.join(cfg.data, "strokes.npy")
    if not os.path.isfile(file):
        rng = np.random.default_rng(9)
        t = np.linspace(0, 1, 60)
        out = np.zeros((1500, SIZE, SIZE), np.float32)
        for img in out:
            a, b, c = rng.uniform(4, SIZE - 5, (3, 2))
            xy = np.outer((1 - t) ** 2, a) + np.outer(2 * t * (1 - t), b) + np.outer(t**2, c)
            ij = xy.round().astype(int)
            img[ij[:, 0], ij[:, 1]] = img[ij[:, 0] + 1, ij[:, 1]] = 1
        np.save(file, out)
    return torch.from_numpy(np.load(file)).view(-1, SIZE * SIZE)


def mlp(*sizes, act=nn.ELU):
    mods = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        mods += [nn.Linear(a, b), act()]
    return nn.Sequential(*mods[:-1])


class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        mask = torch.arange(dim) % 2
        self.register_buffer("mask", (1 - mask if flip else mask).float())
        self.net = mlp(dim, hidden, hidden, 2 * dim)
        self.scale = nn.Parameter(torch.zeros(dim))

    def params(self, z):
        s, t = self.net(z * self.mask).chunk(2, -1)
        return torch.tanh(s) * self.scale * (1 - self.mask), t * (1 - self.mask)

    def forward(self, z):  # data -> base
        s, t = self.params(z)
        return z * s.exp() + t, s.sum(-1)

    def inverse(self, u):
        s, t = self.params(u)
        return (u - t) * (-s).exp()


class FlowPrior(nn.Module):
    def __init__(self, dim, hidden, n):
        super().__init__()
        self.flows = nn.ModuleList([Coupling(dim, hidden, i % 2 == 0) for i in range(n)])
        self.register_buffer("zero", torch.zeros(dim))
        self.register_buffer("one", torch.ones(dim))

    def base(self):
        return D.Independent(D.Normal(self.zero, self.one), 1)

    def log_prob(self, z):
        logdet = 0.0
        for f in self.flows:
            z, ld = f(z)
            logdet = logdet + ld
        return self.base().log_prob(z) + logdet

    def sample(self, n):
        z = self.base().sample((n,))
        for f in reversed(self.flows):
            z = f.inverse(z)
        return z


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = mlp(SIZE * SIZE, cfg.hidden, cfg.hidden, 2 * cfg.latent)
        self.dec = mlp(cfg.latent, cfg.hidden, cfg.hidden, SIZE * SIZE)
        self.prior = FlowPrior(cfg.latent, cfg.hidden // 2, cfg.flows)

    def posterior(self, x):
        mu, rho = self.enc(x).chunk(2, -1)
        return D.Independent(D.Normal(mu, F.softplus(rho) + 1e-4), 1)

    def bound(self, x, beta, k):
        q = self.posterior(x)
        z = q.rsample((k,))  # k, b, latent
        px = D.Independent(D.Bernoulli(logits=self.dec(z)), 1)
        log_w = px.log_prob(x.expand(k, *x.shape)) + beta * (self.prior.log_prob(z) - q.log_prob(z))
        return torch.logsumexp(log_w, 0) - np.log(k)


x = dataset()
train, valid = x[:1300], x[1300:]
model = VAE().to(dev)
opt = torch.optim.Adamax(model.parameters(), lr=2e-3)
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))

bar = trange(cfg.iters)
for it in bar:
    idx = torch.randint(len(train), (cfg.batch,))
    batch = torch.bernoulli(train[idx].to(dev) * 0.98 + 0.01)
    beta = min(1.0, (it + 1) / cfg.beta_warmup)
    loss = -model.bound(batch, beta, cfg.samples).mean()
    if torch.isnan(loss).any():
        raise RuntimeError(f"loss is nan in iteration {it}")
    assert torch.isfinite(loss)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 5.0)
    opt.step()
    ema.update_parameters(model)
    bar.set_postfix(loss=loss.item(), beta=beta)
    if (it + 1) % 10 == 0:
        with torch.no_grad():
            ll = torch.cat([ema.module.bound(b.to(dev), 1.0, 16) for b in valid.split(100)]).mean()
            pics = ema.module.dec(ema.module.prior.sample(36)).sigmoid()
        bar.write(f"{it + 1}: validation bound {ll.item():.2f} (mean pixel {pics.mean():.3f})")

os.makedirs(cfg.out, exist_ok=True)
torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "samples": pics.cpu()}, os.path.join(cfg.out, "final.pt"))
