"""What is reached without training: TF-IDF of characters and words, and the encoder as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from memfit.errors import MissingExtraError

from .encoders import PAD, ChannelEncoders
from .evaluation import tree_metrics
from .texts import CHANNELS

_CHARACTERS = {"analyzer": "char_wb", "ngram_range": (3, 5)}


def text_baselines(
    texts: Sequence[Mapping[str, str]], tree: np.ndarray
) -> dict[str, dict[str, float]]:
    """Return the metrics of TF-IDF, on titles alone and on all four texts."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.metrics.pairwise import cosine_distances
    except ImportError:
        raise MissingExtraError("memfit train naics", "sklearn", "naics") from None
    sources = {
        "titles": [text["title"] for text in texts],
        "all texts": [" ".join(text[channel] for channel in CHANNELS) for text in texts],
    }
    return {
        f"{name}, {source}": tree_metrics(
            cosine_distances(TfidfVectorizer(**how).fit_transform(lines)), tree
        )
        for source, lines in sources.items()
        for name, how in (("character TF-IDF", _CHARACTERS), ("TF-IDF", {}))
    }


@torch.no_grad()
def encoder_baselines(
    encoders: ChannelEncoders, tokens: Mapping[str, Tensor], tree: np.ndarray, chunk: int
) -> dict[str, dict[str, float]]:
    """Return the metrics of the encoder without training: cosine distances of its means."""
    encoders.eval()
    channels = {}
    for channel in CHANNELS:
        rows = [encoders.pooled(channel, ids) for ids in tokens[channel].split(chunk)]
        there = (tokens[channel] != PAD).any(1, keepdim=True)
        channels[channel] = torch.cat(rows).double() * there
    mean = torch.nn.functional.normalize(torch.stack(list(channels.values())).sum(0), dim=1)
    found = {"titles": channels["title"], "mean of all texts": mean}
    return {
        f"encoder without training, {name}": tree_metrics(1 - (each @ each.T).numpy(), tree)
        for name, each in found.items()
    }
