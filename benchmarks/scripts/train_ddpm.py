"""Unconditional image generation with a denoising diffusion model (epsilon prediction, EMA weights)."""
import argparse
import copy
import glob
import logging
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
log = logging.getLogger("ddpm")


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--train_data_dir", type=Path, default=Path("data/blobs"))
    p.add_argument("--output_dir", type=Path, default=Path("out/ddpm"))
    p.add_argument("--resolution", type=int, default=32)
    p.add_argument("--train_batch_size", type=int, default=16)
    p.add_argument("--eval_batch_size", type=int, default=8)
    p.add_argument("--num_epochs", type=int, default=2)
    p.add_argument("--max_train_steps", type=int, default=12, help="stops earlier than num_epochs")
    p.add_argument("--gradient_accumulation_steps", type=int, default=1)
    p.add_argument("--learning_rate", type=float, default=2e-4)
    p.add_argument("--lr_warmup_steps", type=int, default=5)
    p.add_argument("--model_channels", type=int, default=48)
    p.add_argument("--channel_mult", type=int, nargs="+", default=[1, 2, 2])
    p.add_argument("--num_res_blocks", type=int, default=1)
    p.add_argument("--attention_resolutions", type=int, nargs="*", default=[16])
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--ddpm_num_steps", type=int, default=1000)
    p.add_argument("--ddim_sampling_steps", type=int, default=10)
    p.add_argument("--beta_schedule", choices=["linear", "cosine"], default="cosine")
    p.add_argument("--ema_max_decay", type=float, default=0.9999)
    p.add_argument("--save_images_steps", type=int, default=6)
    p.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    p.add_argument("--num_workers", type=int, default=0)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


# ---- data -------------------------------------------------------------------------------------------


def render_blobs(folder, size, count=256):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    grid = np.stack(np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size)), -1)
    for i in range(count):
        img = np.ones((size, size, 3)) * rng.uniform(0, 0.3, 3)
        for _ in range(rng.integers(1, 4)):
            d = ((grid - rng.uniform(0.2, 0.8, 2)) ** 2).sum(-1)
            img += np.exp(-d / rng.uniform(0.005, 0.03))[..., None] * rng.uniform(0, 1, 3)
        Image.fromarray((img.clip(0, 1) * 255).astype(np.uint8)).save(folder / f"{i:05d}.jpg", quality=95)


class ImageFolder(Dataset):
    def __init__(self, folder, resolution):
        self.files = sorted(glob.glob(os.path.join(folder, "*.jpg")))
        self.resolution = resolution

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        img = Image.open(self.files[i]).convert("RGB").resize((self.resolution, self.resolution))
        x = torch.from_numpy(np.array(img)).permute(2, 0, 1).float() / 127.5 - 1
        return x.flip(-1) if torch.rand(()) < 0.5 else x


# ---- model ------------------------------------------------------------------------------------------


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


def norm(c):
    return nn.GroupNorm(16, c)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, temb, dropout):
        super().__init__()
        self.in_layers = nn.Sequential(norm(cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1))
        self.emb = nn.Linear(temb, 2 * cout)
        self.out_norm = norm(cout)
        self.out_layers = nn.Sequential(nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(cout, cout, 3, padding=1))
        nn.init.zeros_(self.out_layers[-1].weight)
        self.skip = nn.Identity() if cin == cout else nn.Conv2d(cin, cout, 1)

    def forward(self, x, emb):
        h = self.in_layers(x)
        scale, shift = self.emb(F.silu(emb))[:, :, None, None].chunk(2, dim=1)
        h = self.out_norm(h) * (1 + scale) + shift
        return self.skip(x) + self.out_layers(h)


class AttnBlock(nn.Module):
    def __init__(self, c, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = norm(c)
        self.qkv = nn.Conv1d(c, 3 * c, 1)
        self.out = nn.Conv1d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).reshape(b, c, h * w)).chunk(3, dim=1)
        ch = c // self.heads
        q, k, v = (a.reshape(b * self.heads, ch, h * w) for a in (q, k, v))
        weight = torch.einsum("bct,bcs->bts", q * ch**-0.25, k * ch**-0.25)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        a = torch.einsum("bts,bcs->bct", weight, v).reshape(b, c, h * w)
        return x + self.out(a).reshape(b, c, h, w)


class UNet(nn.Module):
    def __init__(self, ch, mult, blocks, attn_res, resolution, dropout):
        super().__init__()
        self.ch = ch
        temb = 4 * ch
        self.time = nn.Sequential(nn.Linear(ch, temb), nn.SiLU(), nn.Linear(temb, temb))
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, cur, res = [ch], ch, resolution
        for level, m in enumerate(mult):
            for _ in range(blocks):
                layer = nn.ModuleList([ResBlock(cur, m * ch, temb, dropout)])
                cur = m * ch
                if res in attn_res:
                    layer.append(AttnBlock(cur))
                self.down.append(layer)
                skips.append(cur)
            if level != len(mult) - 1:
                self.down.append(nn.ModuleList([nn.Conv2d(cur, cur, 3, stride=2, padding=1)]))
                skips.append(cur)
                res //= 2
        self.mid = nn.ModuleList([ResBlock(cur, cur, temb, dropout), AttnBlock(cur), ResBlock(cur, cur, temb, dropout)])
        for level, m in reversed(list(enumerate(mult))):
            for i in range(blocks + 1):
                layer = nn.ModuleList([ResBlock(cur + skips.pop(), m * ch, temb, dropout)])
                cur = m * ch
                if res in attn_res:
                    layer.append(AttnBlock(cur))
                if level and i == blocks:
                    layer.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(cur, cur, 3, padding=1)))
                    res *= 2
                self.up.append(layer)
        self.out = nn.Sequential(norm(cur), nn.SiLU(), nn.Conv2d(cur, 3, 3, padding=1))

    @staticmethod
    def run(layers, h, emb):
        for layer in layers:
            h = layer(h, emb) if isinstance(layer, ResBlock) else layer(h)
        return h

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.ch).to(x.dtype))
        h = self.conv_in(x)
        hs = [h]
        for layers in self.down:
            h = self.run(layers, h, emb)
            hs.append(h)
        h = self.run(self.mid, h, emb)
        for layers in self.up:
            h = self.run(layers, torch.cat([h, hs.pop()], dim=1), emb)
        return self.out(h)


class Diffusion(nn.Module):
    def __init__(self, steps, schedule):
        super().__init__()
        if schedule == "linear":
            betas = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)
        else:
            f = torch.cos((torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008 * math.pi / 2) ** 2
            betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
        self.steps = steps
        self.register_buffer("alphas_bar", torch.cumprod(1 - betas, dim=0).float())

    def add_noise(self, x, noise, t):
        a = self.alphas_bar[t][:, None, None, None]
        return a.sqrt() * x + (1 - a).sqrt() * noise

    @torch.no_grad()
    def ddim(self, model, shape, num_steps, device):
        x = torch.randn(shape, device=device)
        times = torch.linspace(self.steps - 1, 0, num_steps).long().tolist()
        for i, t in enumerate(times):
            eps = model(x, torch.full((shape[0],), t, device=device, dtype=torch.long))
            a = self.alphas_bar[t]
            a_next = self.alphas_bar[times[i + 1]] if i + 1 < len(times) else torch.ones_like(a)
            x0 = ((x - (1 - a).sqrt() * eps) / a.sqrt()).clamp(-1, 1)
            x = a_next.sqrt() * x0 + (1 - a_next).sqrt() * eps
        return x


class EMA:
    def __init__(self, model, max_decay):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.max_decay = max_decay
        self.updates = 0

    @torch.no_grad()
    def step(self, model):
        self.updates += 1
        decay = min(self.max_decay, (1 + self.updates) / (10 + self.updates))
        for ema_p, p in zip(self.model.parameters(), model.parameters()):
            ema_p.lerp_(p, 1 - decay)
        for ema_b, b in zip(self.model.buffers(), model.buffers()):
            ema_b.copy_(b)
        return decay


def save_grid(x, path, cols=4):
    x = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().permute(0, 2, 3, 1).numpy()
    rows = [np.concatenate(list(x[i : i + cols]), axis=1) for i in range(0, len(x) - len(x) % cols, cols)]
    Image.fromarray(np.concatenate(rows, axis=0)).save(path)


def main(args):
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (args.output_dir / "samples").mkdir(parents=True, exist_ok=True)
    if not any(args.train_data_dir.glob("*.jpg")):
        render_blobs(args.train_data_dir, args.resolution)

    dataset = ImageFolder(args.train_data_dir, args.resolution)
    loader = DataLoader(
        dataset, batch_size=args.train_batch_size, shuffle=True, drop_last=True, num_workers=args.num_workers
    )
    model = UNet(
        args.model_channels, args.channel_mult, args.num_res_blocks, args.attention_resolutions, args.resolution,
        args.dropout,
    ).to(device)
    diffusion = Diffusion(args.ddpm_num_steps, args.beta_schedule).to(device)
    ema = EMA(model, args.ema_max_decay)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.95, 0.999), weight_decay=1e-6)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / args.lr_warmup_steps))
    amp_dtype = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.mixed_precision]
    scaler = torch.amp.GradScaler(device.type, enabled=args.mixed_precision == "fp16" and device.type == "cuda")
    log.info("%d images, %.1fM parameters", len(dataset), sum(p.numel() for p in model.parameters()) / 1e6)

    global_step = 0
    for epoch in range(args.num_epochs):
        model.train()
        bar = tqdm(total=len(loader), desc=f"Epoch {epoch}")
        for step, clean in enumerate(loader):
            clean = clean.to(device, non_blocking=True)
            noise = torch.randn_like(clean)
            t = torch.randint(0, args.ddpm_num_steps, (clean.shape[0],), device=device).long()
            noisy = diffusion.add_noise(clean, noise, t)
            with torch.autocast(device.type, dtype=amp_dtype, enabled=args.mixed_precision != "no"):
                loss = F.mse_loss(model(noisy, t).float(), noise)
            scaler.scale(loss / args.gradient_accumulation_steps).backward()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                warmup.step()
                decay = ema.step(model)
                global_step += 1
                bar.set_postfix(loss=loss.detach().item(), lr=warmup.get_last_lr()[0], step=global_step, ema_decay=decay)

                if global_step % args.save_images_steps == 0:
                    shape = (args.eval_batch_size, 3, args.resolution, args.resolution)
                    images = diffusion.ddim(ema.model, shape, args.ddim_sampling_steps, device)
                    save_grid(images, args.output_dir / "samples" / f"{global_step:06d}.png")
            bar.update(1)
            if global_step >= args.max_train_steps:
                break
        bar.close()
        torch.save(
            {
                "model_state": model.state_dict(),
                "ema_model_state": ema.model.state_dict(),
                "optimizer_state": optimizer.state_dict(),
                "global_step": global_step,
            },
            args.output_dir / "model.pth",
        )
        if global_step >= args.max_train_steps:
            break


if __name__ == "__main__":
    main(parse_args())
