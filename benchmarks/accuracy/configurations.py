"""Published configurations of transformers models, by the last part of their hub name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .calls import inner_calls, parse_call
from .packages import CannotRebuild
from .rows import Row

_PATH = Path(__file__).parent / "configs.json"
# Summaries name the sizes their own way: the names that configurations have instead.
_OTHER_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_kv_heads": ("num_key_value_heads",),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"),
}
_NO_SETTINGS = frozenset({"cls", "class", "name", "num_params", "model_type", "architectures"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published model: which class, and the values of its configuration."""

    model_type: str
    cls: str
    num_params: int | None
    values: Mapping[str, Any]


@cache
def published() -> Mapping[str, Published]:
    """Return all published configurations by hub name, in lower case and without the owner."""
    found: dict[str, Published] = {}
    for name, entry in json.loads(_PATH.read_text(encoding="utf-8")).items():
        model = Published(
            model_type=entry["model_type"],
            cls=entry["class"],
            num_params=entry["num_params"],
            values=entry["config"],
        )
        found |= dict.fromkeys((name, *entry.get("also", ())), model)
    return found


def find_published(name: str) -> Published | None:
    """Find a published model by its hub name, with or without its owner."""
    return published().get(name.rpartition("/")[2].lower())


def configuration_of(row: Row, transformers: Any) -> Any:
    """Build the configuration of a transformers row: the published one, and what the row gives.

    Raises:
        CannotRebuild: if neither the name nor the row tells the kind of model.
    """
    known = find_published(row.model)
    kind, written = _written_out(row, transformers)
    if kind is None:
        model_type = row.model_config.get("model_type") or (known.model_type if known else None)
        kind = _configuration_class(model_type or _type_of_class(row, transformers), transformers)
        written = dict(known.values) if known else {}
    defaults = kind()
    for name, value in row.model_config.items():
        if name not in _NO_SETTINGS and value is not None:
            written[_name_in(defaults, name, written)] = value
    if not hasattr(defaults, "head_dim"):
        written.pop("head_dim", None)
    return kind(**written)


def _written_out(row: Row, transformers: Any) -> tuple[Any, dict[str, Any]]:
    """Find a configuration in the constructor call, such as ``GPT2Config(n_layer=4)``."""
    for call in inner_calls(parse_call(row.constructor.get("call"))):
        found = getattr(transformers, call.last_name, None)
        if hasattr(found, "model_type") and call.last_name.endswith("Config"):
            return found, dict(call.kwargs)
    return None, {}


def _configuration_class(model_type: str, transformers: Any) -> Any:
    try:
        return type(transformers.AutoConfig.for_model(model_type))
    except ValueError as error:
        reason = f"this transformers knows no model type {model_type!r}"
        raise CannotRebuild(reason) from error


def _name_in(defaults: Any, name: str, values: Mapping[str, Any]) -> str:
    """Translate the name of a size in a summary to the name that the configuration has."""
    if name in values:
        return name
    for other in _OTHER_NAMES.get(name, ()):
        if other in values or hasattr(defaults, other):
            # A mapped attribute has the value under another name, which values may already use.
            return getattr(defaults, "attribute_map", {}).get(other, other)
    return name


def _type_of_class(row: Row, transformers: Any) -> str:
    """Tell the kind of model from its class, where its name is not known."""
    name = row.constructor.get("cls") or row.model_config.get("cls") or row.model
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    config_class = getattr(kind, "config_class", None)
    if config_class is None or not row.model_config:
        raise CannotRebuild(f"the configuration of {row.model} is not known")
    return str(config_class.model_type)
