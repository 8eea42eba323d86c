"""Takes arguments and results of modules apart into leaves, and puts them together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """How leaves make up a value: a pytree, in which dataclasses may stand in place of leaves."""

    spec: TreeSpec
    records: tuple[_Record | None, ...]

    def filled(self, leaves: Sequence[Any]) -> Any:
        """Make a value of this structure from its leaves."""
        return self._filled(iter(leaves))

    def _filled(self, leaves: Iterator[Any]) -> Any:
        values = [
            next(leaves) if record is None else record.filled(leaves) for record in self.records
        ]
        return tree_unflatten(values, self.spec)


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """A dataclass whose fields hold values of some structures."""

    kind: type
    names: tuple[str, ...]
    fields: tuple[Structure, ...]

    def filled(self, leaves: Iterator[Any]) -> Any:
        record: Any = object.__new__(self.kind)
        for name, structure in zip(self.names, self.fields, strict=True):
            object.__setattr__(record, name, structure._filled(leaves))
        return record


def taken_apart(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a value and its structure.

    Leaves are tensors, plain values, and whatever neither torch's pytrees nor dataclasses describe.
    A ``PackedSequence`` is a leaf: its rows are interleaved.
    """
    values, spec = tree_flatten(value, is_leaf=lambda node: isinstance(node, PackedSequence))
    leaves: list[Any] = []
    records: list[_Record | None] = []
    for each in values:
        if dataclasses.is_dataclass(each) and not isinstance(each, type):
            names = tuple(field.name for field in dataclasses.fields(each))
            parts = [taken_apart(getattr(each, name)) for name in names]
            leaves += [leaf for part, _ in parts for leaf in part]
            records.append(_Record(type(each), names, tuple(structure for _, structure in parts)))
        else:
            leaves.append(each)
            records.append(None)
    return leaves, Structure(spec, tuple(records))
