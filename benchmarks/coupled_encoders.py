"""Jobs whose loss couples a batch through encoders: several of them, adapters, mixtures of experts.

They are like the demonstration of NAICS: what is planned for them are cached gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, ViTConfig, ViTModel

from memfit import Job

WIDTH, LENGTH, VOCABULARY = 256, 48, 4000


class Towers(nn.Module):
    """Encoders whose results are pooled to one normalised row (B, width) for each input."""

    def __init__(self, *encoders: nn.Module, mixes: bool = False) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.mixture = Mixture() if mixes else nn.Identity()

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the mean row over all encoders."""
        found = [
            encoder(part).last_hidden_state.mean(1)
            for encoder, part in zip(self.encoders, inputs, strict=True)
        ]
        return F.normalize(self.mixture(torch.stack(found).mean(0)), dim=-1)


class Mixture(nn.Module):
    """Eight experts, all of which are weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the experts' results (B, width)."""
        shares = self.gate(x).softmax(-1)
        return (torch.stack([expert(x) for expert in self.experts], -1) @ shares[..., None])[..., 0]


def _bert(num_layers: int = 6) -> nn.Module:
    return BertModel(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=num_layers,
            num_attention_heads=8, intermediate_size=4 * WIDTH,
        ),
        add_pooling_layer=False,
    )  # fmt: skip


def _adapted(model: nn.Module, *targets: str) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=8, target_modules=list(targets), lora_dropout=0.1))


def _llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=6, num_attention_heads=8,
        intermediate_size=3 * WIDTH,
    )  # fmt: skip
    return _adapted(LlamaModel(config), "q_proj", "v_proj")


def _vit() -> nn.Module:
    config = ViTConfig(
        image_size=64, patch_size=8, hidden_size=WIDTH, num_hidden_layers=6, num_attention_heads=8,
        intermediate_size=4 * WIDTH,
    )  # fmt: skip
    return ViTModel(config, add_pooling_layer=False)


def _contrasted(model: Any, batch: tuple[tuple[torch.Tensor, ...], ...]) -> torch.Tensor:
    one, other = (model(view) for view in batch)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one), device=one.device))


def _job(build: Callable[[], Towers], *draw: Callable[[int], torch.Tensor]) -> Job:
    return Job(
        model=build,
        batch=lambda size: tuple(tuple(each(size) for each in draw) for _ in range(2)),
        loss=_contrasted,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size=64,
    )


def _tokens(size: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (size, LENGTH))


def _images(size: int) -> torch.Tensor:
    return torch.randn(size, 3, 64, 64)


COUPLED: Mapping[str, Job] = {
    "four-encoders": _job(lambda: Towers(*(_bert() for _ in range(4))), *[_tokens] * 4),
    "text-and-images": _job(lambda: Towers(_bert(), _vit()), _tokens, _images),
    "adapted-decoder": _job(lambda: Towers(_llama()), _tokens),
    "adapted-encoders": _job(
        lambda: Towers(*(_adapted(_bert(), "query", "value") for _ in range(2))), *[_tokens] * 2
    ),
    "gated-encoder": _job(lambda: Towers(_bert(12), mixes=True), _tokens),
}
