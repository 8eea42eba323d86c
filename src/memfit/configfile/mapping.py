"""The user's mapping file: which key of a configuration holds what."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from memfit.errors import ConfigFileError

from .document import read_document
from .kinds import HYDRA, Kind, Role

_TABLES = {"precision_words": "precisions", "optimizer_words": "optimizers"}
_NEEDED = (Role.MICRO_BATCH, Role.ACCUMULATION)


def read_mapping(path: Path) -> Kind:
    """Read a mapping file: TOML, YAML or JSON, such as ``micro_batch = "loader.size"``.

    Raises:
        ConfigFileError: if it cannot be read, names something unknown, or lacks a batch key.
    """
    document = read_document(path)
    keys: dict[Role, tuple[str, ...]] = {}
    words: dict[str, dict[str, str]] = {name: {} for name in _TABLES.values()}
    for key, entry in document.tree.entries.items():
        if len(key) == 2 and key[0] in _TABLES:
            words[_TABLES[key[0]]][key[1]] = str(entry.value)
        elif len(key) == 1 and key[0] in set(Role) and isinstance(entry.value, str):
            keys[Role(key[0])] = (entry.value,)
        elif key != ("name",):
            raise ConfigFileError(_unknown(".".join(key)), path)
    for role in _NEEDED:
        if role not in keys:
            reason = (
                f"it does not say which key holds the {role}; a micro-batch and its accumulation "
                "are always written together"
            )
            raise ConfigFileError(reason, path)
    return Kind(
        name=f"as {path.name} says",
        keys=keys,
        precisions=words["precisions"] or HYDRA.precisions,
        optimizers=words["optimizers"],
        is_told=True,
    )


def _unknown(name: str) -> str:
    known = [*map(str, Role), *_TABLES]
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"Nearest: {near[0]}" if near else f"There are: {', '.join(known)}"
    return f"{name} is nothing that a mapping says, or no single word. {hint}"
