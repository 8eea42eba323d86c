"""Token ids of every text, made once. 0 is padding."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from memfit.errors import MissingExtraError

from .encoders import MINILM, PAD, EncoderSizes, minilm_folder
from .texts import CHANNELS

MAX_LENGTH, LONGEST = "max_length", "longest"
_FIRST_WORD = 3
"""Of the hashed vocabulary; 1 and 2 begin and end a text, as in BERT."""


def token_table(
    texts: Sequence[Mapping[str, str]], sizes: EncoderSizes, lengths: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the token ids of all texts by channel, (codes, length), int32.

    A text that is empty has no token at all.
    """
    encode = _minilm() if sizes.base == MINILM else _hashed(sizes.vocabulary)
    table = {}
    for channel in CHANNELS:
        ids = torch.full((len(texts), lengths[channel]), PAD, dtype=torch.int32)
        for row, text in enumerate(texts):
            if text[channel]:
                found = encode(text[channel], lengths[channel])
                ids[row, : len(found)] = torch.tensor(found, dtype=torch.int32)
        table[channel] = ids
    return table


def trimmed(ids: Tensor, padding: str) -> Tensor:
    """Cut the padding that no row of a batch needs, where it is padded to the longest."""
    if padding == MAX_LENGTH:
        return ids
    longest = int((ids != PAD).sum(-1).max()) if ids.numel() else 0
    return ids[..., : max(1, longest)]


def _minilm() -> Callable[[str, int], list[int]]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError("memfit train naics", "tokenizers", "naics") from None
    tokenizer = Tokenizer.from_file(str(Path(minilm_folder()) / "tokenizer.json"))
    tokenizer.no_padding()

    def encode(text: str, length: int) -> list[int]:
        tokenizer.enable_truncation(length)
        found: list[int] = tokenizer.encode(text).ids
        return found

    return encode


def _hashed(vocabulary: int) -> Callable[[str, int], list[int]]:
    """Number words by a hash, for encoders without a vocabulary of their own."""

    def encode(text: str, length: int) -> list[int]:
        words = re.findall(r"\w+", text.lower())[: length - 2]
        span = vocabulary - _FIRST_WORD
        return [1, *(_FIRST_WORD + zlib.crc32(word.encode()) % span for word in words), 2]

    return encode
