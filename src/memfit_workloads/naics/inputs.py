"""The data of a run: the tree, the texts as token ids, and which codes are held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .embedder import EmbedderSizes
from .encoders import ChannelEncoders, EncoderSizes
from .settings import NaicsSettings
from .texts import CHANNELS, read_texts
from .tokens import token_table
from .tree import Tree, hold_out, make_tree

_VALIDATION_SEED_OFFSET = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is trained on, and what is not."""

    tree: Tree
    texts: list[Mapping[str, str]]
    """In the order of the tree's codes."""
    table: dict[str, Tensor]
    train: list[int]
    """Numbers of codes."""
    validation: list[int]
    test: list[int]

    def tokens(self, rows: list[int]) -> dict[str, Tensor]:
        """Return the token ids of some codes."""
        return {channel: ids[rows] for channel, ids in self.table.items()}

    def distances(self, rows: list[int]) -> np.ndarray:
        """Return the distances of some codes in the tree."""
        found: np.ndarray = self.tree.distances[np.ix_(rows, rows)]
        return found


def read_inputs(settings: NaicsSettings) -> Inputs:
    """Read the data that ship, and split the codes by subsector: test first, then validation."""
    texts = read_texts()
    tree = make_tree(list(texts))
    number = {code: row for row, code in enumerate(tree.codes)}
    seed = settings.of("seed")
    rest, test = hold_out(tree.codes, settings.of("data_loader.test_split"), seed)
    train, validation = hold_out(
        rest, settings.of("data_loader.val_split"), seed + _VALIDATION_SEED_OFFSET
    )
    in_order = [texts[code] for code in tree.codes]
    return Inputs(
        tree=tree,
        texts=in_order,
        table=token_table(in_order, encoder_sizes(settings), lengths(settings)),
        train=[number[code] for code in train],
        validation=[number[code] for code in validation],
        test=[number[code] for code in test],
    )


def lengths(settings: NaicsSettings) -> dict[str, int]:
    """Return the tokens of each channel at most."""
    tokenization = settings.of("data_loader.tokenization")
    given = tokenization.get("lengths") or {}
    return {channel: given.get(channel, tokenization["max_length"]) for channel in CHANNELS}


def encoder_sizes(settings: NaicsSettings) -> EncoderSizes:
    """Return what the encoders are."""
    model = settings.of("model")
    return EncoderSizes(
        base=model["base_model_name"].rpartition("/")[2],
        lora_rank=model["lora"]["r"],
        lora_alpha=model["lora"]["alpha"],
        lora_dropout=model["lora"]["dropout"],
        frozen_layers=model["frozen_layers"],
        recompute=model["gradient_checkpointing"],
        **model.get("encoder", {}),
    )


def embedder_sizes(settings: NaicsSettings) -> EmbedderSizes:
    """Return what the embedder is."""
    experts, loss = settings.of("model.moe"), settings.of("loss")
    return EmbedderSizes(
        encoder=encoder_sizes(settings),
        num_experts=experts["num_experts"],
        top_k=experts["top_k"],
        expert_hidden=experts["hidden_dim"],
        expert_dropout=experts["dropout"],
        residual=experts["residual"],
        unit_length=settings.of("model.unit_length"),
        curvature=float(loss["curvature"]),
        max_norm=float(loss["max_norm"]),
    )


@torch.no_grad()
def centre_of(encoders: ChannelEncoders, inputs: Inputs, chunk: int) -> Tensor:
    """Return the mean vector of each channel over the texts that are trained on."""
    means = []
    for channel in CHANNELS:
        ids = torch.unique(inputs.table[channel][inputs.train], dim=0)
        ids = ids[(ids != 0).any(1)]
        ids = ids[(ids != 0).sum(1).argsort()]  # short texts together, padded to theirs
        parts = [
            encoders.pooled(channel, part[:, : int((part != 0).sum(1).max())])
            for part in ids.split(chunk)
        ]
        means.append(torch.cat(parts).mean(0))
    return torch.stack(means)
