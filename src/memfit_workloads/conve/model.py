"""ConvE: a convolution over head and relation, scored against every entity.

Shape suffixes: B rows, N entities, D embedding dimension, H x W its image, C output channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .sizes import ConvESizes


class ConvE(nn.Module):
    """Score every entity as the tail of (head, relation).

    Relation ``r + num_relations`` is the inverse of ``r``, so heads are predicted as tails of the
    inverse relation. The encoder has two stages, each a block for activation checkpointing:
    ``encoder.0`` makes the feature maps, ``encoder.1`` projects them.

    Source: Dettmers et al. 2018 (arXiv 1707.01476), section 4, with the layer order of its
    reference code (github.com/TimDettmers/ConvE).
    """

    def __init__(self, sizes: ConvESizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.entity_embedding = nn.Embedding(sizes.num_entities, sizes.embedding_dim)
        self.relation_embedding = nn.Embedding(2 * sizes.num_relations, sizes.embedding_dim)
        self.entity_bias = nn.Parameter(torch.zeros(sizes.num_entities))
        self.encoder = nn.Sequential(_feature_stage(sizes), _projection_stage(sizes))
        nn.init.xavier_normal_(self.entity_embedding.weight)
        nn.init.xavier_normal_(self.relation_embedding.weight)

    def encode(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Encode queries: (B,) and (B,) int64 to (B, D)."""
        shape = (-1, 1, self.sizes.embedding_height, self.sizes.embedding_width)
        head_B1HW = self.entity_embedding(heads).view(shape)
        relation_B1HW = self.relation_embedding(relations).view(shape)
        encoded: Tensor = self.encoder(torch.cat([head_B1HW, relation_B1HW], dim=2))
        return encoded

    def forward(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Score every entity: (B,) and (B,) int64 to logits (B, N)."""
        query_BD = self.encode(heads, relations)
        return nn.functional.linear(query_BD, self.entity_embedding.weight, self.entity_bias)


def _feature_stage(sizes: ConvESizes) -> nn.Sequential:
    """Make (B, C, 2H - kernel + 1, W - kernel + 1) out of the stacked image (B, 1, 2H, W)."""
    return nn.Sequential(
        nn.BatchNorm2d(1),
        nn.Dropout(sizes.input_dropout),
        nn.Conv2d(1, sizes.output_channels, (sizes.kernel_height, sizes.kernel_width)),
        nn.BatchNorm2d(sizes.output_channels),
        nn.ReLU(),
        nn.Dropout2d(sizes.feature_map_dropout),
    )


def _projection_stage(sizes: ConvESizes) -> nn.Sequential:
    """Make (B, D) out of the feature maps."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(sizes.num_features, sizes.embedding_dim),
        nn.Dropout(sizes.output_dropout),
        nn.BatchNorm1d(sizes.embedding_dim),
        nn.ReLU(),
    )


def build_model(sizes: ConvESizes, seed: int) -> ConvE:
    """Build a model whose weights depend on the seed alone; the random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConvE(sizes)
