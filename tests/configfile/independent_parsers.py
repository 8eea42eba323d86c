"""What files say, by parsers that memfit does not use for editing: each value by its key."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def values_of(path: Path, content: bytes) -> dict[str, Any]:
    """Read all values, the parts of each key parted by slashes."""
    text = content.decode("utf-8-sig")
    if path.suffix == ".py":
        return python_values(text)
    if path.suffix == ".json":
        return flat(json.loads(text))
    if path.suffix == ".toml":
        return flat(tomllib.loads(text))
    documents = list(yaml.safe_load_all(text))
    return flat(documents[0] if len(documents) == 1 else documents)


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """List the values of nested mappings and lists, and the empty ones among these."""
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    if not parts:
        return {key: value}
    found = {}
    for name, part in parts:
        found |= flat(part, f"{key}/{name}" if key else str(name))
    return found


def python_values(text: str) -> dict[str, Any]:
    """List keywords of calls, assigned names and entries of dicts with the literals they have."""
    return dict(_bindings(ast.parse(text)))


def _bindings(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _keywords(node)
        elif isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), _literal(node.value)
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), _literal(node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                yield str(_literal(key)), _literal(value)


def _keywords(node: ast.Call) -> Iterator[tuple[str, Any]]:
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "add_argument":
        name = str(_literal(node.args[0]))
    for keyword in node.keywords:
        yield f"{name}/{keyword.arg}", _literal(keyword.value)


def _literal(node: Any) -> Any:
    if isinstance(node, ast.Call | ast.Dict):
        return "..."
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
