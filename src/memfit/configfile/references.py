"""What follows from a value: ``${data.batch_size}`` in Hydra, OmegaConf and the Lightning CLI.

Source: https://omegaconf.readthedocs.io/en/2.3_branch/usage.html#variable-interpolation
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from memfit.errors import ConfigFileError

from .hydra import Part
from .tree import Key, dotted

_REFERENCE = re.compile(r"\$\{([^${}:]+)\}|\$\{oc\.select:\s*([^,${}\s]+)")
_PURE = re.compile(r"\s*\$\{([^${}:]+)\}\s*")
_INNERMOST_RESOLVER = re.compile(r"\$\{(?!oc\.select:)[\w.]+:[^${}]*\}")
_RESOLVER = re.compile(r"\$\{[\w.]+:")
_INDEX = re.compile(r"\[([^\]]+)\]")
_SAME_THING = ("batch", "accum", "precision", "checkpointing", "optim")
_WHOLE_BATCH = ("effective", "global", "total")


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """A value that refers to others."""

    part: Part
    local: Key
    text: str

    @property
    def key(self) -> Key:
        """Return its key in the whole configuration."""
        return (*self.part.package, *self.local)

    def __str__(self) -> str:
        line = self.part.document.tree.entries[self.local].line
        return f"{dotted(self.key)} ({self.part.document.path}:{line})"


def referred_key(text: str, key: Key) -> Key | None:
    """Return the key that a value at another is a plain copy of; None where it is none.

    >>> referred_key("${data.batch_size}", ("model", "batch_size"))
    ('data', 'batch_size')
    >>> referred_key("${.train}", ("data", "val"))
    ('data', 'train')
    """
    found = _PURE.fullmatch(text)
    return _absolute(found[1], key) if found else None


def followers_of(parts: Sequence[Part], changed: Collection[Key]) -> list[str]:
    """Say which values become others because some are changed.

    Raises:
        ConfigFileError: if one is computed from what is changed, or is another thing.
    """
    affected, texts = set(changed), list(_texts(parts))
    while True:
        reached = {text: keys for text in texts if (keys := _reached(text, affected))}
        news = {key for keys in reached.values() for key in keys} - affected
        if not news:
            return [_said(text, keys) for text, keys in reached.items()]
        affected |= news


def _texts(parts: Sequence[Part]) -> Iterator[_Text]:
    for part in parts:
        if part.document.format == "YAML":
            for local, entry in part.document.tree.entries.items():
                if isinstance(entry.value, str) and "${" in entry.value:
                    yield _Text(part, local, entry.value)


def _reached(text: _Text, affected: Collection[Key]) -> set[Key]:
    """Return the keys at and below a value that take over what is changed."""
    targets = [_absolute(one or other, text.key) for one, other in _REFERENCE.findall(text.text)]
    return {
        (*text.key, *key[len(target) :])
        for target in targets
        for key in affected
        if key[: len(target)] == target
    }


def _said(text: _Text, reached: Collection[Key]) -> str:
    """Say what follows.

    Raises:
        ConfigFileError: if that is a value computed from what is changed, or another thing.
    """
    if _PURE.fullmatch(text.text):
        names = [key[-1].lower() for key in reached]
        if not all(_is_like(name) for name in names):
            _refuse(text, "is a copy of")
        return f"{text} is {text.text}, so it changes as well."
    if _RESOLVER.search(_without_resolvers(text.text)):
        _refuse(text, "is computed from")
    return f"{text} has it in its text, {text.text}, which changes as well."


def _is_like(name: str) -> bool:
    is_whole = any(word in name for word in _WHOLE_BATCH)
    return any(word in name for word in _SAME_THING) and not is_whole


def _refuse(text: _Text, how: str) -> None:
    raise ConfigFileError(
        f"{text} is {text.text}: it {how} what the plan changes, and would silently become "
        "another value. Write the value that it has now there, or name other keys with --mapping",
        text.part.document.path,
    )


def _without_resolvers(text: str) -> str:
    """Take out calls that refer to nothing, such as ``${now:%Y}``."""
    while (less := _INNERMOST_RESOLVER.sub("", text)) != text:
        text = less
    return text


def _absolute(path: str, key: Key) -> Key:
    """Return the key that a path means at another key; leading dots go up from there."""
    path = path.strip()
    name = path.lstrip(".")
    num_up = len(path) - len(name)
    parts = tuple(part for part in _INDEX.sub(r".\1", name).split(".") if part)
    return (*key[:-num_up], *parts) if num_up else parts
