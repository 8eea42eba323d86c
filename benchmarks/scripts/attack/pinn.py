"""Physics-informed network for the Burgers equation u_t + u u_x = nu u_xx; Adam first, L-BFGS after."""
import argparse
import math
import os
import time

import numpy as np
import torch
import torch.nn as nn


class FCN(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in zip(layers[:-1], layers[1:])])
        for lin in self.linears:
            nn.init.xavier_normal_(lin.weight.data, gain=1.0)
            nn.init.zeros_(lin.bias.data)

    def forward(self, x, t):
        h = torch.cat([x, 2 * t - 1], dim=1)
        for lin in self.linears[:-1]:
            h = torch.tanh(lin(h))
        return self.linears[-1](h)


class PINN:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.nu = nn.Parameter(torch.tensor(0.05, device=device)) if args.inverse else torch.tensor(0.01 / math.pi, device=device)
        self.net = FCN([2] + [args.width] * args.depth + [1]).to(device)
        self.params = list(self.net.parameters()) + ([self.nu] if args.inverse else [])
        self.load_points()
        self.adam = torch.optim.Adam(self.params, lr=1e-3)
        self.lbfgs = torch.optim.LBFGS(self.params, lr=1.0, max_iter=args.lbfgs_iters, max_eval=int(1.25 * args.lbfgs_iters),
                                       history_size=20, tolerance_grad=1e-8, tolerance_change=1e-10,
                                       line_search_fn="strong_wolfe")
        self.iter = 0

    def load_points(self):
        os.makedirs(self.args.data, exist_ok=True)
        path = os.path.join(self.args.data, f"points_{self.args.collocation}.npz")
        if not os.path.exists(path):
            rng = np.random.default_rng(0)
            t0 = rng.uniform(0, 1, (200, 1))
            np.savez(path, xf=rng.uniform(-1, 1, (self.args.collocation, 1)), tf=rng.uniform(0, 1, (self.args.collocation, 1)),
                     x0=rng.uniform(-1, 1, (200, 1)), tb=t0, xb=np.where(rng.random((200, 1)) < 0.5, -1.0, 1.0))
        pts = {k: torch.tensor(v, dtype=torch.float32, device=self.device) for k, v in np.load(path).items()}
        self.xf, self.tf = pts["xf"].requires_grad_(), pts["tf"].requires_grad_()
        self.x0, self.xb, self.tb = pts["x0"], pts["xb"], pts["tb"]
        self.u0 = -torch.sin(math.pi * self.x0)

    def residual(self, x, t):
        u = self.net(x, t)
        u_t = torch.autograd.grad(u, t, torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
        return u_t + u * u_x - self.nu * u_xx

    def loss(self):
        f = (self.residual(self.xf, self.tf) ** 2).mean()
        ic = ((self.net(self.x0, torch.zeros_like(self.x0)) - self.u0) ** 2).mean()
        bc = (self.net(self.xb, self.tb) ** 2).mean()
        return f + ic + bc, (f, ic, bc)

    def closure(self):
        self.lbfgs.zero_grad()
        loss, parts = self.loss()
        loss.backward()
        self.iter += 1
        if self.iter % 10 == 0:
            print("  eval %d: %.3e (pde %.2e, ic %.2e, bc %.2e)" % (self.iter, loss.item(), *[p.item() for p in parts]))
        return loss

    def train(self):
        t0 = time.time()
        for epoch in range(self.args.adam_iters):
            self.adam.zero_grad()
            loss, _ = self.loss()
            loss.backward()
            self.adam.step()
            if epoch % 5 == 0:
                print(f"adam {epoch}: {loss.item():.3e}")
            if self.args.resample and epoch % 10 == 9:
                self.resample()
        for outer in range(self.args.lbfgs_outer):
            loss = self.lbfgs.step(self.closure)
            print(f"lbfgs {outer}: {float(loss):.3e} after {self.iter} evaluations, {time.time() - t0:.1f}s")

    def resample(self):
        """Replace the tenth of the points with the smallest residual."""
        r = self.residual(self.xf, self.tf).abs().detach().flatten()
        keep = r.argsort()[len(r) // 10 :]
        new = len(r) - len(keep)
        with torch.no_grad():
            xf = torch.cat([self.xf[keep], torch.rand(new, 1, device=self.device) * 2 - 1])
            tf = torch.cat([self.tf[keep], torch.rand(new, 1, device=self.device)])
        self.xf, self.tf = xf.requires_grad_(), tf.requires_grad_()

    @torch.no_grad()
    def predict(self, n=128):
        x, t = torch.meshgrid(torch.linspace(-1, 1, n), torch.linspace(0, 1, n), indexing="ij")
        u = self.net(x.reshape(-1, 1).to(self.device), t.reshape(-1, 1).to(self.device))
        return u.reshape(n, n).cpu().numpy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/burgers")
    parser.add_argument("--out", default="out/pinn")
    parser.add_argument("--collocation", type=int, default=4000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--adam_iters", type=int, default=20)
    parser.add_argument("--lbfgs_outer", type=int, default=2)
    parser.add_argument("--lbfgs_iters", type=int, default=10)
    parser.add_argument("--inverse", action="store_true", help="learn the viscosity too")
    parser.add_argument("--resample", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1234)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pinn = PINN(args, device)
    pinn.train()
    os.makedirs(args.out, exist_ok=True)
    np.save(os.path.join(args.out, "u.npy"), pinn.predict())
    torch.save(pinn.net.state_dict(), os.path.join(args.out, "net.pt"))
