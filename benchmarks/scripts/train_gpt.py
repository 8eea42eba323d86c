"""
Pretrain a small character-level GPT.

$ python train_gpt.py --batch_size=4 --max_iters=200

With a file of overrides (plain python assignments), command line last:
$ python train_gpt.py config/small.py --learning_rate=1e-3
"""

import inspect
import math
import os
import pickle
import sys
import time
from ast import literal_eval
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

# -----------------------------------------------------------------------------
# I/O
out_dir = 'out'
data_dir = 'data/chars'
eval_interval = 4
log_interval = 1
eval_iters = 3
eval_only = False
always_save_checkpoint = False
init_from = 'scratch'  # 'scratch' or 'resume'
# data
gradient_accumulation_steps = 4
batch_size = 4  # micro-batch size
block_size = 256
# model
n_layer = 4
n_head = 4
n_embd = 256
dropout = 0.1
bias = False
# adamw
learning_rate = 6e-4
max_iters = 8
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0  # 0.0 turns clipping off
# lr schedule
decay_lr = True
warmup_iters = 2
lr_decay_iters = 8
min_lr = 6e-5
# system
device = 'cuda' if torch.cuda.is_available() else 'cpu'
dtype = 'bfloat16' if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False) else 'float16'
compile = False
seed = 1337
# -----------------------------------------------------------------------------
config_keys = [k for k, v in globals().items() if not k.startswith('_') and isinstance(v, (int, float, bool, str))]
for arg in sys.argv[1:]:
    if '=' not in arg:
        print(f"reading overrides from {arg}")
        exec(open(arg).read())
        continue
    key, val = arg.removeprefix('--').split('=', 1)
    if key not in config_keys:
        raise ValueError(f"unknown config key: {key}")
    try:
        val = literal_eval(val)
    except (SyntaxError, ValueError):
        pass  # a plain string
    if isinstance(globals()[key], float) and isinstance(val, int) and not isinstance(val, bool):
        val = float(val)
    assert type(val) is type(globals()[key]), f"{key} wants {type(globals()[key])}, got {val!r}"
    globals()[key] = val
config = {k: globals()[k] for k in config_keys}
# -----------------------------------------------------------------------------


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):

    def __init__(self, cfg):
        super().__init__()
        assert cfg.n_embd % cfg.n_head == 0
        self.n_head = cfg.n_head
        self.dropout = cfg.dropout
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=cfg.bias)
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.resid_dropout = nn.Dropout(cfg.dropout)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.proj(y))


class Block(nn.Module):

    def __init__(self, cfg):
        super().__init__()
        self.ln1 = LayerNorm(cfg.n_embd, cfg.bias)
        self.attn = Attention(cfg)
        self.ln2 = LayerNorm(cfg.n_embd, cfg.bias)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=cfg.bias),
            nn.GELU(),
            nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=cfg.bias),
            nn.Dropout(cfg.dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        x = x + self.mlp(self.ln2(x))
        return x


@dataclass
class GPTConfig:
    block_size: int = 256
    vocab_size: int = 96
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    dropout: float = 0.0
    bias: bool = True


class GPT(nn.Module):

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.tok = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.pos = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.ln_f = LayerNorm(cfg.n_embd, cfg.bias)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.head.weight = self.tok.weight  # tied

        self.apply(self._init)
        for name, p in self.named_parameters():
            if name.endswith('proj.weight'):  # smaller at the end of a residual branch
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * cfg.n_layer))
        print(f"parameters: {sum(p.numel() for p in self.parameters()) / 1e6:.2f}M")

    @staticmethod
    def _init(m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, mean=0.0, std=0.02)
            if getattr(m, 'bias', None) is not None:
                nn.init.zeros_(m.bias)

    def forward(self, idx, targets=None):
        B, T = idx.shape
        assert T <= self.cfg.block_size, f"sequence of {T}, block size is only {self.cfg.block_size}"
        pos = torch.arange(T, dtype=torch.long, device=idx.device)
        x = self.drop(self.tok(idx) + self.pos(pos))
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    def make_optimizer(self, weight_decay, lr, betas, device_type):
        decay = [p for p in self.parameters() if p.requires_grad and p.dim() >= 2]
        rest = [p for p in self.parameters() if p.requires_grad and p.dim() < 2]
        groups = [{'params': decay, 'weight_decay': weight_decay}, {'params': rest, 'weight_decay': 0.0}]
        can_fuse = 'fused' in inspect.signature(torch.optim.AdamW).parameters
        extra = {'fused': True} if can_fuse and device_type == 'cuda' else {}
        print(f"using fused AdamW: {bool(extra)}")
        return torch.optim.AdamW(groups, lr=lr, betas=betas, **extra)


def prepare_data(path, n_chars=400_000):
    """Write train.bin, val.bin and meta.pkl, once. The text is a random walk over made-up words."""
    if os.path.exists(os.path.join(path, 'meta.pkl')):
        return
    os.makedirs(path, exist_ok=True)
    rng = np.random.default_rng(0)
    letters = np.array(list('abcdefghijklmnopqrstuvwxyz'))
    words = [''.join(rng.choice(letters, size=rng.integers(2, 9))) for _ in range(500)]
    text, size, i = [], 0, 0
    while size < n_chars:
        i = (i * 7 + int(rng.integers(0, 5))) % len(words)
        word = words[i].capitalize() if rng.random() < 0.1 else words[i]
        text.append(word + (rng.choice([' ', ' ', ' ', ', ', '.\n'])))
        size += len(text[-1])
    text = ''.join(text)
    chars = sorted(set(text))
    stoi = {ch: i for i, ch in enumerate(chars)}
    ids = np.array([stoi[c] for c in text], dtype=np.uint16)
    n = int(0.9 * len(ids))
    ids[:n].tofile(os.path.join(path, 'train.bin'))
    ids[n:].tofile(os.path.join(path, 'val.bin'))
    with open(os.path.join(path, 'meta.pkl'), 'wb') as f:
        pickle.dump({'vocab_size': len(chars), 'stoi': stoi, 'itos': dict(enumerate(chars))}, f)


os.makedirs(out_dir, exist_ok=True)
prepare_data(data_dir)
torch.manual_seed(seed)
torch.set_float32_matmul_precision('high')
device_type = 'cuda' if 'cuda' in device else 'cpu'
if device_type == 'cuda':
    autocast = torch.amp.autocast(device_type, dtype=getattr(torch, dtype))
else:
    autocast = nullcontext()
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
print(f"{tokens_per_iter:,} tokens per iteration on {device}")


def get_batch(split):
    # opened anew each time, or the pages that were read would pile up
    tokens = np.memmap(os.path.join(data_dir, split + '.bin'), dtype=np.uint16, mode='r')
    starts = torch.randint(len(tokens) - block_size - 1, (batch_size,)).tolist()
    rows = np.stack([tokens[s:s + block_size + 1] for s in starts]).astype(np.int64)
    rows = torch.from_numpy(rows)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    if device_type == 'cuda':
        inputs = inputs.pin_memory().to(device, non_blocking=True)
        targets = targets.pin_memory().to(device, non_blocking=True)
    return inputs, targets


with open(os.path.join(data_dir, 'meta.pkl'), 'rb') as f:
    meta = pickle.load(f)

ckpt_path = os.path.join(out_dir, 'ckpt.pt')
start_iter, best_val_loss, resumed = 0, float('inf'), None
if init_from == 'resume':
    print(f"resuming from {ckpt_path}")
    resumed = torch.load(ckpt_path, map_location=device)
    gptconf = GPTConfig(**resumed['gptconf'])
    start_iter, best_val_loss = resumed['iter'], resumed['best_val_loss']
else:
    gptconf = GPTConfig(block_size, meta['vocab_size'], n_layer, n_head, n_embd, dropout, bias)
model = GPT(gptconf)
if resumed:
    model.load_state_dict(resumed['model'])
model.to(device)

scaler = torch.amp.GradScaler(device_type, enabled=(dtype == 'float16' and device_type == 'cuda'))
optimizer = model.make_optimizer(weight_decay, learning_rate, (beta1, beta2), device_type)
if resumed:
    optimizer.load_state_dict(resumed['optimizer'])
    del resumed

raw_model = model
if compile:
    print("compiling the model...")
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    result = {}
    for split in ('train', 'val'):
        total = torch.zeros(eval_iters)
        for k in range(eval_iters):
            with autocast:
                _, loss = model(*get_batch(split))
            total[k] = loss.item()
        result[split] = total.mean().item()
    model.train()
    return result


def lr_at(it):
    """Linear warmup, cosine down to min_lr, then flat."""
    if not decay_lr:
        return learning_rate
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    progress = min(1.0, (it - warmup_iters) / max(1, lr_decay_iters - warmup_iters))
    return min_lr + (learning_rate - min_lr) * (0.5 + 0.5 * math.cos(math.pi * progress))


inputs, targets = get_batch('train')
smooth = None
tick = time.time()
for it in range(start_iter, max_iters + 1):
    for group in optimizer.param_groups:
        group['lr'] = lr_at(it)

    if it % eval_interval == 0:
        losses = estimate_loss()
        print(f"[{it}] train {losses['train']:.4f} val {losses['val']:.4f}")
        improved = losses['val'] < best_val_loss
        best_val_loss = min(best_val_loss, losses['val'])
        if it > 0 and (improved or always_save_checkpoint):
            state = {'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict(), 'iter': it,
                     'gptconf': vars(gptconf), 'best_val_loss': best_val_loss, 'config': config}
            torch.save(state, ckpt_path)
            print(f"checkpoint -> {ckpt_path}")
        if eval_only:
            break

    for _ in range(gradient_accumulation_steps):
        with autocast:
            logits, loss = model(inputs, targets)
            loss = loss / gradient_accumulation_steps
        inputs, targets = get_batch('train')  # prefetched while the gpu works on the forward pass
        scaler.scale(loss).backward()
    if grad_clip > 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    now = time.time()
    dt, tick = now - tick, now
    if it % log_interval == 0:
        value = loss.item() * gradient_accumulation_steps  # waits for the gpu
        smooth = value if smooth is None else 0.9 * smooth + 0.1 * value
        print(f"iter {it}: loss {value:.4f} (avg {smooth:.4f}) {dt * 1000:.0f} ms, {tokens_per_iter / dt:.0f} tok/s")
