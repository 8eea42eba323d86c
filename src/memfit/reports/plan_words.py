"""Says in words what a plan does: one line for each strategy, from its label alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

_LABEL = re.compile(r"(?P<name>[\w-]+)(?:\((?P<settings>.*)\))?", re.DOTALL)
_MOST_NAMES = 2

WORDS: Mapping[str, str] = {
    "activation-checkpointing": "compute {blocks} again in backward",
    "activation-offload": "keep what {blocks} save on the {to} until backward",
    "allocator-settings": "set PYTORCH_ALLOC_CONF={settings}",
    "batchnorm-replay": "run pieces of {micro_batch_size} with the batch's statistics",
    "bf16": "compute forward and loss in bf16",
    "cached-gradients": "run encoders in pieces of {micro_batch_size}, the loss on all",
    "convolution-tiling": "compute convolutions in {num_tiles} stripes",
    "ddp": "give each rank the model and a share of the batch",
    "eight-bit-optimizer": "keep the optimizer's states in 8 bits",
    "four-bit-base": "freeze the model in 4 bits and train adapters",
    "fp16": "compute forward and loss in fp16, with scaled gradients",
    "frozen-offload": "keep frozen weights on the {to}, but those of one block",
    "fsdp2": "shard parameters, gradients and states over the ranks",
    "fused-attention": "compute attention without its matrix of scores",
    "host-modules": "compute {modules} on the host",
    "linear-cross-entropy": "score {num_rows} rows at a time, and keep no logits",
    "loss-chunking": "stream the loss over {num_candidates} candidates at a time",
    "micro-batching": "run the batch in pieces of {micro_batch_size}",
    "optimizer-implementation": "step the optimizer with its {implementation} code",
    "optimizer-in-backward": "update each parameter in backward, and drop its gradient",
    "optimizer-offload": "keep the optimizer's states on the {to}",
    "pure-bf16": "keep parameters, gradients and states in bf16",
    "tiling": "compute {blocks} in {num_tiles} tiles, and again in backward",
}
"""By the name of a strategy, with the names of its settings."""
_SINGLE = {
    "allocator-settings": "settings",
    "activation-checkpointing": "blocks",
    "activation-offload": "to",
    "batchnorm-replay": "micro_batch_size",
    "cached-gradients": "micro_batch_size",
    "convolution-tiling": "num_tiles",
    "frozen-offload": "to",
    "host-modules": "modules",
    "linear-cross-entropy": "num_rows",
    "loss-chunking": "num_candidates",
    "micro-batching": "micro_batch_size",
    "optimizer-implementation": "implementation",
    "optimizer-offload": "to",
    "tiling": "num_tiles",
}
"""The setting that a label holds where it holds one without a name."""
_WITHOUT = {"blocks": "blocks", "modules": "modules", "to": "host"}
"""What settings mean that a label leaves out."""


def plan_in_words(strategies: Sequence[str]) -> list[tuple[str, str]]:
    """Return what each strategy of a plan does, with its name; those of one name are one.

    Args:
        strategies: their labels, such as ``micro-batching(32)``.

    >>> plan_in_words(["micro-batching(32)"])
    [('run the batch in pieces of 32', 'micro-batching')]
    """
    counts = Counter(_name_of(label) for label in strategies)
    found: dict[str, str] = {}
    for label in strategies:
        name = _name_of(label)
        words = _words(label)
        if counts[name] > 1:
            words = _words(name)
            words += f", in {counts[name]} ways"
        found.setdefault(name, words)
    return [(words, name) for name, words in found.items()]


def _name_of(label: str) -> str:
    match = _LABEL.match(label)
    return match["name"] if match else label


def _words(label: str) -> str:
    match = _LABEL.fullmatch(label)
    if match is None or match["name"] not in WORDS:
        return label
    name, text = match["name"], match["settings"] or ""
    settings = _settings(name, text)
    words = WORDS[name]
    for setting in re.findall(r"\{(\w+)\}", words):
        value = settings.get(setting) or _WITHOUT.get(setting)
        if value is None:
            return label
        words = words.replace(f"{{{setting}}}", _in_brief(value))
    if kept := settings.get("keep"):
        # Blocks keep results of operators, by names that nobody looks up.
        many = f"{len(kept.split())} results" if "{blocks}" in WORDS[name] else _in_brief(kept)
        words += f", but for {many}"
    return words


def _settings(name: str, text: str) -> dict[str, str]:
    """Take a label's settings apart: ``blocks=a b, keep=c``."""
    single = _SINGLE.get(name)
    if single is not None and not re.match(r"\w+=", text):
        return {single: text}
    pairs = (part.partition("=") for part in re.split(r", (?=\w+=)", text))
    found = {key: value for key, _, value in pairs}
    return {**found, "settings": text}


def _in_brief(value: str) -> str:
    names = value.split()
    return value if len(names) <= _MOST_NAMES else f"{len(names)} modules"
