"""Architectures for tokens, features, tables and graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .images import Chain, Mean, Recomputing, Residual, Stack


class Recurrent(nn.Module):
    """A language model with a recurrent network of torch's own."""

    def __init__(self, kind: str = "LSTM", width: int = 1024, vocabulary: int = 16000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.network = getattr(nn, kind)(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predict the next token everywhere; shapes (B, T) and (B, T, V)."""
        return self.head(self.network(self.embedding(x))[0])


class FeatureRecurrent(nn.Module):
    """A classifier of feature sequences, read in both directions."""

    def __init__(self, features: int = 80, width: int = 512, num_classes: int = 200) -> None:
        super().__init__()
        self.network = nn.GRU(features, width, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify whole sequences; shapes (B, T, F) and (B, C)."""
        return self.head(self.network(x)[0].mean(1))


class Encoder(nn.Module):
    """A text classifier around ``nn.TransformerEncoder``."""

    def __init__(self, width: int = 768, depth: int = 8, num_classes: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30000, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify texts; shapes (B, T) and (B, C)."""
        return self.head(self.layers(self.embedding(x)).mean(1))


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` of a sequence to itself, with or without its weights."""

    def __init__(self, width: int, *, gives_weights: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 8, dropout=0.1, batch_first=True)
        self.gives_weights = gives_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend from everywhere to everywhere."""
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=self.gives_weights)[0]


def attention(width: int = 512, depth: int = 6) -> nn.Module:
    """Build blocks of multi-head attention, every second one with its weights."""
    blocks = [
        Residual(SelfAttention(width, gives_weights=bool(index % 2))) for index in range(depth)
    ]
    return Chain(Stack(*blocks), nn.Linear(width, width))


class CausalAttention(nn.Module):
    """Attention to earlier tokens, with several query heads to each key head."""

    def __init__(self, width: int, num_heads: int, num_key_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.head_width = width // num_heads
        self.inputs = nn.Linear(width, (num_heads + 2 * num_key_heads) * self.head_width)
        self.outputs = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend; shapes (B, T, W)."""
        batch_size, length, width = x.shape
        joint = self.inputs(x).view(batch_size, length, -1, self.head_width).transpose(1, 2)
        sizes = (self.num_heads, self.num_key_heads, self.num_key_heads)
        query, key, value = joint.split(sizes, dim=1)
        is_grouped = self.num_heads != self.num_key_heads
        found = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=is_grouped
        )
        return self.outputs(found.transpose(1, 2).reshape(batch_size, length, width))


class Gated(nn.Module):
    """A gated linear unit with SiLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
        )
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the gate, and go back to the width."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(Recomputing):
    """A causal language model."""

    def __init__(
        self, width: int = 768, depth: int = 12, vocabulary: int = 32000, *, modern: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        num_heads = width // 64
        norm = nn.RMSNorm if modern else nn.LayerNorm

        def block() -> nn.Module:
            attend = CausalAttention(width, num_heads, num_heads // 4 if modern else num_heads)
            wide = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
            )
            inner = Gated(width, 8 * width // 3) if modern else wide
            return nn.Sequential(
                Residual(nn.Sequential(norm(width), attend)),
                Residual(nn.Sequential(norm(width), inner)),
            )

        self.layers = Stack(*(block() for _ in range(depth)))
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predict the next token everywhere; shapes (B, T) and (B, T, V)."""
        return self.head(self.norm(self.layers(self.embedding(x))))


class Translator(nn.Module):
    """``nn.Transformer`` with a causal mask on the target side."""

    def __init__(self, width: int = 512, vocabulary: int = 20000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Transformer(width, 8, 4, 4, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Predict target tokens; shapes (B, S), (B, T) and (B, T, V)."""
        source, target = self.embedding(x), self.embedding(y)
        mask = self.layers.generate_square_subsequent_mask(
            y.shape[1], device=y.device, dtype=source.dtype
        )
        return self.head(self.layers(source, target, tgt_mask=mask, tgt_is_causal=True))


class Recommender(nn.Module):
    """Large tables, looked up many times, under a small network."""

    def __init__(self, entries: int = 400_000, tables: int = 4, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(tables))
        self.network = nn.Sequential(
            nn.Linear(tables * width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()
        )
        self.head = nn.Linear(256, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predict a click; shapes (B, tables, lookups) and (B, 2)."""
        found = [table(x[:, index]).mean(1) for index, table in enumerate(self.tables)]
        return self.head(self.network(torch.cat(found, dim=1)))


class Towers(nn.Module):
    """Two towers whose outputs are compared within the batch; gives the loss of each pair."""

    def __init__(self, features: int = 1024, width: int = 2048) -> None:
        super().__init__()

        def tower() -> nn.Module:
            return nn.Sequential(
                nn.Linear(features, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 512)
            )

        self.left, self.right = tower(), tower()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compare all pairs; shapes (B, F), (B, F) and (B,)."""
        left, right = F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1)
        scores = left @ right.T / 0.07
        own = torch.arange(len(x), device=x.device)
        there = F.cross_entropy(scores, own, reduction="none")
        return there + F.cross_entropy(scores.T, own, reduction="none")


class Graph(nn.Module):
    """Messages along the edges of a graph, summed at their ends."""

    def __init__(self, nodes: int = 50_000, width: int = 256, num_classes: int = 40) -> None:
        super().__init__()
        self.nodes = nn.Embedding(nodes, width)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify the nodes; shapes (2, E) for E edges and (N, C) for N nodes."""
        state = self.nodes.weight
        for layer in self.layers:
            messages = torch.zeros_like(state).index_add(0, x[1], state[x[0]])
            state = F.relu(layer(torch.cat((state, messages), dim=1)))
        return self.head(state)


def tagger(width: int = 512, num_classes: int = 50) -> nn.Module:
    """Build a bag of embedded words under a linear classifier."""
    return Chain(
        nn.Embedding(100_000, width), Mean(1), nn.LayerNorm(width), nn.Linear(width, num_classes)
    )


SEQUENCE_MODELS: dict[str, Callable[..., nn.Module]] = {
    "attention": attention,
    "decoder": Decoder,
    "encoder": Encoder,
    "feature_recurrent": FeatureRecurrent,
    "graph": Graph,
    "recommender": Recommender,
    "recurrent": Recurrent,
    "tagger": tagger,
    "towers": Towers,
    "translator": Translator,
}
