"""Jobs of many kinds on which the planner is tried, each in a size to record and one to run."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from memfit import Job, Plan
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import load_device
from memfit.planner.search.evaluation import JobEvaluator
from memfit.planner.search.options import SearchSpace
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.recording import record
from memfit.session.batches import find_layout

VOCABULARY = 64


class Attention(nn.Module):
    """Causal attention, with one projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        size, tokens, width = x.shape
        parts = self.qkv(x).view(size, tokens, 3, self.num_heads, -1).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(size, tokens, width))


class MLP(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class TransformerBlock(nn.Module):
    """A block that normalises first."""

    def __init__(self, width: int, mlp: Callable[[int], nn.Module] = MLP) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = mlp(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Experts(nn.Module):
    """Each expert takes the tokens that fit it best, so many that all shapes are known."""

    def __init__(self, width: int, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(MLP(width) for _ in range(num_experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        weights, chosen = scores.topk(tokens.shape[0] // len(self.experts), dim=0)
        for number, expert in enumerate(self.experts):
            rows = chosen[:, number]
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[:, number, None])
        return out.view_as(x)


class LanguageModel(nn.Module):
    """Embedding, blocks and a head, which may share the embedding's weight."""

    def __init__(self, blocks, width: int, num_rounds: int = 1, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(blocks)
        self.num_rounds = num_rounds
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for _ in range(self.num_rounds):
            for block in self.blocks:
                hidden = block(hidden)
        return self.head(self.norm(hidden))


class ResidualConvolution(nn.Module):
    """Two convolutions with batch normalisation and ReLU in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        hidden = self.relu(self.norm1(self.conv1(x)))
        hidden = self.norm2(self.conv2(hidden))
        hidden += x
        return self.relu(hidden)


class ResNet(nn.Module):
    """A stem, residual blocks and a classifier."""

    def __init__(self, channels: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )
        self.layers = nn.Sequential(*(ResidualConvolution(channels) for _ in range(num_blocks)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, 10)

    def forward(self, x):
        return self.classifier(self.pool(self.layers(self.stem(x))).flatten(1))


class Twice(nn.Sequential):
    """Two convolutions."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(2, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Three levels down and up, with skip connections."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down1 = Twice(3, channels)
        self.down2 = Twice(channels, 2 * channels)
        self.bottom = Twice(2 * channels, 4 * channels)
        self.up2 = Twice(6 * channels, 2 * channels)
        self.up1 = Twice(3 * channels, channels)
        self.out = nn.Conv2d(channels, 3, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        up = self.up2(torch.cat([F.interpolate(bottom, scale_factor=2), second], 1))
        up = self.up1(torch.cat([F.interpolate(up, scale_factor=2), first], 1))
        return self.out(up)


class Recurrent(nn.Module):
    """An LSTM of two layers and a head of three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Sequential(
            nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, 4 * width), nn.Tanh(),
            nn.Linear(4 * width, VOCABULARY),
        )  # fmt: skip

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class PostNorm(nn.Module):
    """torch's own encoder, which normalises last and drops."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)))


def next_token_loss(model, ids):
    found = model(ids)
    logits = getattr(found, "logits", found)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def square_loss(model, x):
    return model(x).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def language_job(model, tokens: int, batch_size: int, optimizer=adam) -> Job:
    return Job(
        model=model,
        batch=lambda size: torch.randint(0, VOCABULARY, (size, tokens)),
        loss=next_token_loss,
        optimizer=optimizer,
        batch_size=batch_size,
    )


def image_job(model, pixels: int, batch_size: int) -> Job:
    return Job(
        model=model,
        batch=lambda size: torch.randn(size, 3, pixels, pixels),
        loss=square_loss,
        optimizer=sgd,
        batch_size=batch_size,
    )


def transformer(width=256, num_blocks=3, tokens=128, batch_size=8, mlp=MLP) -> Job:
    def model():
        return LanguageModel((TransformerBlock(width, mlp) for _ in range(num_blocks)), width)

    return language_job(model, tokens, batch_size)


def experts(width=128, num_blocks=2, tokens=64, batch_size=8) -> Job:
    return transformer(width, num_blocks, tokens, batch_size, Experts)


def tied(width=128, num_blocks=3, tokens=128, batch_size=8) -> Job:
    def model():
        blocks = (TransformerBlock(width) for _ in range(num_blocks))
        return LanguageModel(blocks, width, is_tied=True)

    return language_job(model, tokens, batch_size)


def called_twice(width=128, num_blocks=3, tokens=128, batch_size=8) -> Job:
    def model():
        return LanguageModel((TransformerBlock(width) for _ in range(num_blocks)), width, 2)

    return language_job(model, tokens, batch_size)


def resnet(channels=16, num_blocks=3, pixels=32, batch_size=16) -> Job:
    return image_job(lambda: ResNet(channels, num_blocks), pixels, batch_size)


def unet(channels=16, pixels=32, batch_size=8) -> Job:
    return image_job(lambda: UNet(channels), pixels, batch_size)


def recurrent(width=64, tokens=32, batch_size=32) -> Job:
    return Job(
        model=lambda: Recurrent(width),
        batch=lambda size: torch.randn(size, tokens, width),
        loss=square_loss,
        optimizer=sgd,
        batch_size=batch_size,
    )


def post_norm(width=128, num_blocks=2, tokens=128, batch_size=8) -> Job:
    return language_job(lambda: PostNorm(width, num_blocks), tokens, batch_size)


def hugging_face(
    name: str, width: int = 128, num_blocks: int = 2, tokens: int = 128, batch_size: int = 8
) -> Job:
    """Return a small model of transformers, built from its configuration, with its cache left on."""
    import transformers

    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if name == "GPT2LMHeadModel":
        sizes = {"n_embd": width, "n_layer": num_blocks, "n_head": 4, "n_positions": 512}
        rates = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        config = transformers.GPT2Config(**common, **sizes, **rates, use_cache=True)
    else:
        sizes = {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": num_blocks,
            "num_attention_heads": 4,
        }
        family = name.removesuffix("ForCausalLM").removesuffix("ForMaskedLM")
        config = getattr(transformers, f"{family}Config")(**common, **sizes, use_cache=True)
    return language_job(lambda: getattr(transformers, name)(config), tokens, batch_size)


def gpt2(**sizes) -> Job:
    return hugging_face("GPT2LMHeadModel", **sizes)


def bert(**sizes) -> Job:
    return hugging_face("BertForMaskedLM", **sizes)


def llama(**sizes) -> Job:
    return hugging_face("LlamaForCausalLM", **sizes)


JOBS = {
    "transformer": transformer,
    "experts": experts,
    "tied": tied,
    "called_twice": called_twice,
    "resnet": resnet,
    "unet": unet,
    "recurrent": recurrent,
    "post_norm": post_norm,
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
}


def reasons(plan) -> dict[str, str]:
    """Return why strategies were left out of a plan, by name."""
    return {refusal.strategy: refusal.sentence for refusal in plan.refused}


def evaluator_of(job, device="cpu", plan=None, **wanted) -> JobEvaluator:
    """Evaluate combinations of a job under a budget that holds everything.

    ``wanted`` is what the search space has besides nothing at all.
    """
    spec, layout = load_device(device), find_layout(job)
    return JobEvaluator(
        job=job,
        device=spec,
        layout=layout,
        times=OperatorTimes(device=spec),
        budget=MemoryBudget(num_bytes=10**12, of="allocated"),
        space=SearchSpace(options=(), splits=(), must_split=False, refused=(), **wanted),
        plain=record(job, plan or Plan(), layout, device=spec),
    )
