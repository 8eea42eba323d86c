"""A configuration, which may be several files: where each role's value is, or could be added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

from memfit.errors import ConfigFileError

from . import kinds
from .document import Document, read_document
from .hydra import CONFIG_NAME, Part, parts_of
from .kinds import HYDRA, TRANSFORMERS, Kind, Role
from .references import referred_key
from .tree import Entry, Insertion, Key, Tree, Value, dotted

_LIKE = 0.9
_MOST_STEPS = 8
_COUNTS = frozenset({Role.MICRO_BATCH, Role.ACCUMULATION})
_UNKNOWN = (
    "it is no kind of configuration that memfit knows (transformers TrainingArguments, Lightning, "
    "Hydra, DeepSpeed, Accelerate, axolotl, LLaMA-Factory). Say which key holds what in a small "
    'file, such as micro_batch = "loader.size" and accumulation = "loop.every", and give it with '
    "--mapping"
)
_ARGUMENT_NAMES = {
    *("num_train_epochs", "save_strategy", "eval_strategy", "logging_steps", "lr_scheduler_type"),
    "overwrite_output_dir",
}
_STAGE_NAMES = {"anchor_level", "positive_level", "positive_relation", "n_positives", "n_negatives"}
_DEEPSPEED_NAMES = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands."""

    document: Document
    key: Key

    @property
    def entry(self) -> Entry:
        """Return the value as it was read."""
        return self.document.tree.entries[self.key]

    def __str__(self) -> str:
        line = f":{self.entry.line}" if self.entry.line else ""
        return f"{dotted(self.key)} ({self.document.path}{line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Files that one trainer reads as one configuration."""

    kind: Kind
    parts: tuple[Part, ...]
    home: Key = ()
    is_one: bool = True
    """Whether the parts are one configuration, so that of two that set a key the later counts."""

    def keys(self, role: Role) -> list[Key]:
        """Return where a role's value may be, in the whole configuration."""
        return [(*self.home, *name.split(".")) for name in self.kind.keys.get(role, ())]

    def place(self, role: Role) -> Place | None:
        """Find a role's value.

        Raises:
            ConfigFileError: if several keys could be meant, or the key holds no single value.
        """
        found: list[Place] = []
        for key in self.keys(role):
            there = [each for each in self._local(key) if self._is_in(*each)]
            for part, local in there[-1:] if self.is_one else there:
                if local in part.document.tree.entries:
                    place = self._source(part, local)
                    found += [place] if place not in found else []
                elif role is not Role.DEVICES:
                    raise ConfigFileError(
                        f"{dotted(key)} is a group of values, such as a schedule, and no single "
                        "number; change it by hand",
                        part.document.path,
                    )
        if len(found) > 1:
            found = _without_computed(found)
        if len(found) > 1:
            raise ConfigFileError(
                f"the {role} could be any of {', '.join(map(str, found))}. Say with --mapping "
                "which is meant",
                found[0].document.path,
            )
        if not found:
            self._refuse_likely_misspelling(role)
            self._refuse_elsewhere(role)
        return found[0] if found else None

    def num_listed(self, role: Role) -> int | None:
        """Count the entries of a list; None where the role's value is none."""
        for key in self.keys(role):
            there = [each for each in self._local(key) if self._is_in(*each)]
            for part, local in there[-1:]:
                if local in part.document.tree.groups:
                    return len(part.document.tree.under(local))
        return None

    def addition(self, role: Role, value: Value) -> tuple[Document, Insertion] | None:
        """Say where a value that is not there would be written; None where it cannot be."""
        if role not in self.kind.adds:
            return None
        for key in self.keys(role):
            for part, local in self._local(key):
                group, name, new = local[:-1], local[-1], value
                if group and group not in part.document.tree.groups and not self.kind.adds_beside:
                    group, name, new = group[:-1], group[-1], {name: bool(value)}
                if beside := self._beside(part.document, group):
                    return part.document, Insertion(beside=beside, name=name, value=new)
        return None

    def check_all_there(self) -> None:
        """Refuse keys of the user's mapping that the files do not have.

        Raises:
            ConfigFileError: if one is missing; it names the nearest.
        """
        for role in self.kind.keys:
            if self.place(role) is None and self.num_listed(role) is None:
                (key,) = self.keys(role)
                near = [part.document.tree.nearest(key) for part in self.parts]
                hint = ", ".join(name for name in near if name)
                raise ConfigFileError(
                    f"there is no key {dotted(key)}, which the mapping names for the {role}. "
                    + (f"Nearest: {hint}" if hint else "Nothing there is like it"),
                    ", ".join(str(part.document.path) for part in self.parts),
                )

    def _local(self, key: Key) -> list[tuple[Part, Key]]:
        """Return each file that may hold a key, the one that counts last, with its key there."""
        return [
            (part, key[len(part.package) :])
            for part in sorted(self.parts, key=lambda part: part.order)
            if key[: len(part.package)] == part.package and len(key) > len(part.package)
        ]

    def _source(self, part: Part, local: Key, most_steps: int = _MOST_STEPS) -> Place:
        """Return where a value comes from: itself, or what it is a plain copy of."""
        value = part.document.tree.entries[local].value
        key = referred_key(value, (*part.package, *local)) if isinstance(value, str) else None
        if key is not None and most_steps and part.document.format == "YAML":
            for other, there in reversed(self._local(key)):
                if there in other.document.tree.entries:
                    return self._source(other, there, most_steps - 1)
        return Place(part.document, local)

    @staticmethod
    def _is_in(part: Part, key: Key) -> bool:
        return key in part.document.tree.entries or key in part.document.tree.groups

    def _beside(self, document: Document, group: Key) -> Key | None:
        """Choose the key that a new one is written behind."""
        entries = document.tree.entries
        inside = [key for key in entries if key[:-1] == group and key[-1:] != ("?",)]
        names = {key[-1] for key in inside}
        if self.kind.adds_beside and not names & self.kind.adds_beside:
            return None
        wanted = {alternatives[0].split(".")[-1] for alternatives in self.kind.keys.values()}
        inside = [key for key in inside if not entries[key].obstacle or document.format == "Python"]
        ours = [key for key in inside if key[-1] in wanted]
        return next(iter(ours or inside[-1:]), None)

    def _refuse_elsewhere(self, role: Role) -> None:
        """Refuse to take a default where a number of that name stands in another group.

        Raises:
            ConfigFileError: if there is such a number.
        """
        if role not in self.kind.adds & _COUNTS:
            return
        names = {key[-1] for key in self.keys(role)}
        for part in self.parts:
            for key, entry in part.document.tree.entries.items():
                if key[-1] in names and type(entry.value) is int:
                    raise ConfigFileError(
                        f"the {role} was looked for as {dotted(self.keys(role)[0])}, and there is "
                        f"{Place(part.document, key)}, in a group that memfit does not know. Say "
                        "with --mapping whether that is meant",
                        part.document.path,
                    )

    def _refuse_likely_misspelling(self, role: Role) -> None:
        """Refuse a key that is nearly the one that is looked for.

        Raises:
            ConfigFileError: if there is one.
        """
        if role not in self.kind.adds:
            return
        known = {name for names in self.kind.keys.values() for name in names}
        for key in self.keys(role):
            for part, local in self._local(key):
                for name in part.document.tree.under(local[:-1]):
                    like = SequenceMatcher(None, name, local[-1]).ratio()
                    if like > _LIKE and name not in known and name != local[-1]:
                        raise ConfigFileError(
                            f"there is no key {local[-1]}, but {name}, which is nearly the same. "
                            "Correct it, or take it out",
                            part.document.path,
                        )


def _without_computed(places: list[Place]) -> list[Place]:
    """Leave out what a program computes, where there is a literal that it may come from."""
    literal = [
        place
        for place in places
        if place.document.format != "Python" or not str(place.entry.value).startswith("=")
    ]
    return literal or places


def read_settings(paths: Sequence[Path], mapping: Kind | None = None) -> list[Settings]:
    """Read configuration files; a folder stands for the config.yaml in it.

    Raises:
        ConfigFileError: if one cannot be read or is of no known kind, or lacks a mapped key.
    """
    files = [path / CONFIG_NAME if path.is_dir() else path for path in paths]
    documents = [read_document(path) for path in {file.resolve(): file for file in files}.values()]
    if mapping is not None:
        parts = tuple(_without_repeats([part for each in documents for part in parts_of(each)]))
        told = Settings(kind=mapping, parts=parts, is_one=len(documents) == 1)
        told.check_all_there()
        return [told]
    found, brought_in = [], set()
    for document in documents:
        if document.path.resolve() in brought_in:
            continue
        parts = tuple(_without_repeats(parts_of(document)))
        brought_in |= {part.document.path.resolve() for part in parts[1:]}
        found.append(_settings_of(parts))
    return [each for each in found if each.parts[0].document.path.resolve() not in brought_in]


def _settings_of(parts: tuple[Part, ...]) -> Settings:
    """Tell the kind by the first file, or by one that it brings in."""
    main = parts[0].document
    kind = _python_kind(main.tree) if main.format == "Python" else _kind(main.tree)
    if kind is None:
        raise ConfigFileError(_UNKNOWN, main.path)
    home: Key = ()
    if kind is not HYDRA:
        return Settings(kind=kind, parts=parts, home=_home_of(main, kind))
    for part in parts[1:]:
        if any(key[-1] == "per_device_train_batch_size" for key in part.document.tree.entries):
            kind, home = TRANSFORMERS, (*part.package, *_home_of(part.document, TRANSFORMERS))
    return Settings(kind=kind, parts=parts, home=home)


def _without_repeats(parts: Sequence[Part]) -> list[Part]:
    seen: dict[Path, Part] = {}
    for part in parts:
        path = part.document.path.resolve()
        first = seen.setdefault(path, part)
        if part.package != first.package:
            seen[path] = replace(first, twin=part.package)
    return list(seen.values())


def _home_of(document: Document, kind: Kind) -> Key:
    """Return the group that a kind's keys are in.

    Raises:
        ConfigFileError: if there are several such groups.
    """
    if not kind.anchors:
        return ()
    for name in kind.anchors:
        homes = [key[:-1] for key in document.tree.entries if key[-1] == name]
        if len(homes) > 1:
            raise ConfigFileError(
                f"{name} is in it {len(homes)} times ("
                f"{', '.join(dotted((*home, name)) for home in homes)}), so say with --mapping "
                "which is meant",
                document.path,
            )
        if homes:
            return homes[0]
    return ()


def _kind(tree: Tree) -> Kind | None:
    """Try the kinds from the most particular to the most general."""
    top = set(tree.under(()))
    if "distributed_type" in top or {"mixed_precision", "num_processes"} <= top:
        return kinds.ACCELERATE
    if top & _DEEPSPEED_NAMES:
        return kinds.DEEPSPEED
    if "micro_batch_size" in top or {"base_model", "sequence_len"} <= top:
        return kinds.AXOLOTL
    names = {key[-1] for key in tree.entries}
    if "per_device_train_batch_size" in names or _is_like_training_arguments(top):
        return kinds.LLAMA_FACTORY if "finetuning_type" in names else kinds.TRANSFORMERS
    return _of_a_tree(tree, top)


def _of_a_tree(tree: Tree, top: set[str]) -> Kind | None:
    if len(top & _STAGE_NAMES) >= 2:
        return kinds.STAGE
    if _is_chain(tree):
        return kinds.CHAIN
    for group in (("trainer",), ("training", "trainer"), ("training",)):
        if kinds.TRAINER_NAMES & set(tree.under(group)):
            return kinds.HYDRA
    hydra_keys = (tuple(key.split(".")) for keys in kinds.HYDRA.keys.values() for key in keys)
    found = any(key in tree.entries or key in tree.groups for key in hydra_keys)
    return kinds.HYDRA if found or "defaults" in top else None


def _python_kind(tree: Tree) -> Kind | None:
    names = {key[-1] for key in tree.entries}
    if "per_device_train_batch_size" in names or any(
        key[0].endswith("TrainingArguments") and "output_dir" in tree.under(key)
        for key in tree.groups
        if len(key) == 1
    ):
        return kinds.TRANSFORMERS
    if set(tree.under(("Accelerator",))) & kinds.ACCELERATOR_NAMES:
        return kinds.ACCELERATE_PYTHON
    if set(tree.under(("Trainer",))) & kinds.TRAINER_NAMES:
        return kinds.LIGHTNING_PYTHON
    return None


def _is_like_training_arguments(top: set[str]) -> bool:
    """Return whether a file that leaves the batch to its default is one of TrainingArguments."""
    has_another_batch = any("batch_size" in name for name in top)
    return "output_dir" in top and bool(top & _ARGUMENT_NAMES) and not has_another_batch


def _is_chain(tree: Tree) -> bool:
    """Return whether a list of stages is what the file is about."""
    for name in ("stages", "chain", "curriculum"):
        if (name, "0", "max_epochs") in tree.entries or (name, "0", "name") in tree.entries:
            return True
        if (name, "0") in tree.entries:
            return True
    return False
