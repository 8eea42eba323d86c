"""A sparse mixture-of-experts language model, trained from scratch on synthetic "dialects"."""

import argparse
import dataclasses
import json
import math
import pathlib
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclasses.dataclass
class Config:
    vocab_size: int = 512
    d_model: int = 192
    n_layers: int = 4
    n_heads: int = 6
    n_kv_heads: int = 2
    d_expert: int = 384
    n_experts: int = 8
    top_k: int = 2
    max_len: int = 256
    rope_base: float = 10000.0
    moe_every: int = 2  # every second block is sparse
    router_jitter: float = 0.01


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x.to(dtype) * self.weight


def rope_table(cfg, device=None):
    dim = cfg.d_model // cfg.n_heads
    inv = cfg.rope_base ** (-torch.arange(0, dim, 2, device=device).float() / dim)
    angles = torch.outer(torch.arange(cfg.max_len, device=device).float(), inv)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x, table):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[None, : x.shape[1], None]).flatten(-2).type_as(x)


class GQA(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.hd = cfg.d_model // cfg.n_heads
        self.wq = nn.Linear(cfg.d_model, cfg.n_heads * self.hd, bias=False)
        self.wkv = nn.Linear(cfg.d_model, 2 * cfg.n_kv_heads * self.hd, bias=False)
        self.wo = nn.Linear(cfg.d_model, cfg.d_model, bias=False)

    def forward(self, x, table, mask):
        b, t, _ = x.shape
        q = rotate(self.wq(x).view(b, t, self.cfg.n_heads, self.hd), table)
        k, v = self.wkv(x).view(b, t, 2, self.cfg.n_kv_heads, self.hd).unbind(2)
        k = rotate(k, table)
        rep = self.cfg.n_heads // self.cfg.n_kv_heads
        k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.hd)
        scores = scores.masked_fill(mask[:t, :t], float("-inf"))
        out = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(q) @ v
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))


class SwiGLU(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.gate_up = nn.Linear(d, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class SparseMoE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_experts, self.top_k, self.jitter = cfg.n_experts, cfg.top_k, cfg.router_jitter
        self.router = nn.Linear(cfg.d_model, cfg.n_experts, bias=False)
        self.experts = nn.ModuleList([SwiGLU(cfg.d_model, cfg.d_expert) for _ in range(cfg.n_experts)])
        self.shared = SwiGLU(cfg.d_model, cfg.d_expert)
        self.register_buffer("load", torch.zeros(cfg.n_experts), persistent=False)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        routed = x
        if self.training and self.jitter > 0:
            routed = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        logits = self.router(routed).float()
        probs = logits.softmax(-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)

        out = torch.zeros_like(x)
        for e in range(self.n_experts):
            hit = chosen == e
            if not hit.any():
                continue
            token, slot = hit.nonzero(as_tuple=True)
            y = self.experts[e](x[token]) * weights[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))

        # Switch-style balance: share of tokens times mean probability; and the z loss of the router
        counts = F.one_hot(chosen, self.n_experts).sum((0, 1)).float()
        share = counts / counts.sum()
        balance = self.n_experts * (share * probs.mean(0)).sum()
        z = logits.logsumexp(-1).pow(2).mean()
        if self.training:
            self.load.mul_(0.9).add_(share, alpha=0.1)
        return (out + self.shared(x)).view(shape), balance, z


class Block(nn.Module):
    def __init__(self, cfg, sparse):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(cfg.d_model), RMSNorm(cfg.d_model)
        self.attn = GQA(cfg)
        self.sparse = sparse
        self.ffn = SparseMoE(cfg) if sparse else SwiGLU(cfg.d_model, cfg.d_expert * cfg.top_k)

    def forward(self, x, table, mask):
        x = x + self.attn(self.norm1(x), table, mask)
        if self.sparse:
            y, balance, z = self.ffn(self.norm2(x))
            return x + y, balance, z
        return x + self.ffn(self.norm2(x)), None, None


class MoETransformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList([Block(cfg, (i + 1) % cfg.moe_every == 0) for i in range(cfg.n_layers)])
        self.norm = RMSNorm(cfg.d_model)
        self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        self.register_buffer("rope", rope_table(cfg), persistent=False)
        self.register_buffer("mask", torch.ones(cfg.max_len, cfg.max_len, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        balance, z = x.new_zeros(()), x.new_zeros(())
        for block in self.blocks:
            x, b, zz = block(x, self.rope, self.mask)
            if b is not None:
                balance = balance + b
                z = z + zz
        logits = self.lm_head(self.norm(x)).float()
        ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return ce, balance, z


class Corpus:
    """Each dialect is a sparse Markov chain over its own part of the vocabulary."""

    def __init__(self, folder, cfg, n_docs=400):
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"dialects_v{cfg.vocab_size}.npz"
        if not file.exists():
            rng = np.random.default_rng(11)
            part = cfg.vocab_size // 4
            docs = []
            for _ in range(n_docs):
                base = rng.integers(4) * part
                jump = rng.integers(1, part, size=part)
                doc = np.empty(cfg.max_len + 1, dtype=np.int16)
                state = 0
                for i in range(len(doc)):
                    state = (state * 3 + jump[state % part] * int(rng.random() < 0.2) + 1) % part
                    doc[i] = base + state
                docs.append(doc)
            np.savez(file, docs=np.stack(docs))
        docs = torch.from_numpy(np.load(file)["docs"].astype(np.int64))
        split = int(0.9 * len(docs))
        self.parts = {"train": docs[:split], "val": docs[split:]}

    def batches(self, part, size, device, generator=None):
        docs = self.parts[part]
        order = torch.randperm(len(docs), generator=generator) if part == "train" else torch.arange(len(docs))
        for idx in order.split(size):
            rows = docs[idx].to(device, non_blocking=True)
            yield rows[:, :-1], rows[:, 1:]


@torch.inference_mode()
def validate(model, corpus, args, device):
    model.eval()
    total, n = 0.0, 0
    for x, y in corpus.batches("val", args.batch_size, device):
        ce, *_ = model(x, y)
        total += float(ce) * len(x)
        n += len(x)
    model.train()
    return total / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/dialects")
    ap.add_argument("--out", default="out/moe")
    ap.add_argument("--steps", type=int, default=12)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--eval-every", type=int, default=6)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--balance-weight", type=float, default=1e-2)
    ap.add_argument("--z-weight", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=0)
    for f in dataclasses.fields(Config):
        ap.add_argument(f"--{f.name.replace('_', '-')}", type=f.type, default=f.default)
    args = ap.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = Config(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Config)})
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(dataclasses.asdict(cfg), indent=2))

    corpus = Corpus(args.data, cfg)
    model = MoETransformer(cfg).to(device)
    total = sum(p.numel() for p in model.parameters())
    idle = sum(p.numel() for m in model.modules() if isinstance(m, SparseMoE) for p in m.experts.parameters())
    print(f"{total / 1e6:.2f}M parameters, {(total - idle * (1 - cfg.top_k / cfg.n_experts)) / 1e6:.2f}M active")

    decay = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n and "router" not in n]
    ids = {id(p) for p in decay}
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if id(p) not in ids], "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95),
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps + 1, pct_start=0.2)
    use_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)

    step = 0
    history = []
    while step < args.steps:
        for x, y in corpus.batches("train", args.batch_size, device):
            start = time.perf_counter()
            with torch.autocast(device, dtype=torch.bfloat16, enabled=use_bf16):
                ce, balance, z = model(x, y)
                loss = ce + args.balance_weight * balance + args.z_weight * z
            optimizer.zero_grad()
            loss.backward()
            gnorm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not torch.isfinite(gnorm):
                print("skipping a step, gradient is not finite")
                continue
            optimizer.step()
            scheduler.step()
            step += 1
            history.append({"step": step, "ce": ce.item(), "balance": balance.item(), "gnorm": gnorm.item()})
            if step % 2 == 0:
                loads = [m.load.max().item() for m in model.modules() if isinstance(m, SparseMoE)]
                print(f"{step:4d} ce {ce.item():.3f} balance {balance.item():.3f} |g| {gnorm:.2f} "
                      f"busiest expert {max(loads):.2f} {time.perf_counter() - start:.2f}s")
            if step % args.eval_every == 0:
                print(f"     val {validate(model, corpus, args, device):.3f}")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, out / "last.pt")
            if step >= args.steps:
                break
    (out / "history.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main()
