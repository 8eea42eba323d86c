"""What the flags of ``memfit tracin`` mean, as data. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import UsageError
from memfit_workloads.memory_settings import read_flags

from .arguments import BOTH, ROW, TAIL, TARGET, TRAINING, WITHOUT_EFFECT

_USUAL_TOP_K = 10
_USUAL_LAYERS = 2
_MOST_IN_RANGE = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFiles:
    """What is written besides the terminal."""

    output: Path | None
    csv_output: Path | None
    page: Path | None
    output_per_triple: bool

    def each(self) -> list[Path]:
        """Return the files that were asked for."""
        return [path for path in (self.output, self.csv_output, self.page) if path is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracinSettings:
    """Everything that one tracing is told."""

    model_path: Sequence[Path]
    checkpoints: str
    learning_rate: float | None
    embedding_dim: int | None
    output_channels: int | None
    dataset: str | None
    train: Path | None
    valid: Path | None
    test: Path | None
    entity_to_id: Path | None
    relation_to_id: Path | None
    node_name_dict: Path | None
    edge_map: Path | None
    mode: str
    test_indices: tuple[int, ...] | None
    max_test_triples: int | None
    train_indices: tuple[int, ...] | None
    """None compares all training triples."""
    max_train_triples: int | None
    top_k: int | None
    """None gives all."""
    loss: str
    triple_loss: str
    sides: str
    training_target: str | None
    label_smoothing: float | None
    layers: int | tuple[str, ...] | None
    """None compares all parameters."""
    unproved: Sequence[str]
    device: str | None
    budget_bytes: int | None
    batch_size: int | None
    use_mixed_precision: bool
    dry_run: bool
    files: OutputFiles
    folder: Path | None
    notes: tuple[str, ...]
    """What is said of flags that nothing depends on."""

    @property
    def has_test(self) -> bool:
        """Return whether test triples are asked about."""
        return self.mode != "self"


def settings_from(args: argparse.Namespace) -> TracinSettings:
    """Turn parsed flags into settings.

    Raises:
        UsageError: if flags contradict each other.
    """
    _check(args)
    indices = read_indices(args.test_indices, "--test-indices")
    if args.mode == "single":
        indices = indices or (0,)
        if len(indices) != 1:
            msg = f"--mode single takes one of --test-indices, not {len(indices)}; see --mode test."
            raise UsageError(msg)
    top_k = args.top_k
    if top_k is None and args.mode == "test":
        top_k = _USUAL_TOP_K
    return read_flags(
        TracinSettings,
        args,
        test_indices=indices,
        train_indices=read_indices(args.train_indices, "--train-indices"),
        top_k=top_k,
        **_definition(args),
        layers=_layers(args),
        budget_bytes=args.budget,
        files=read_flags(OutputFiles, args),
        notes=tuple(_notes(args)),
    )


def read_indices(words: Sequence[str] | None, flag: str) -> tuple[int, ...] | None:
    """Read numbers and ranges of numbers, as in ``0 3,5 7-9``, each once, in this order.

    Raises:
        UsageError: if a word is something else.
    """
    if words is None:
        return None
    found: dict[int, None] = {}
    for word in ",".join(words).split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            msg = f"{flag} takes numbers from 0 up and ranges such as 7-9, not {word!r}."
            raise UsageError(msg)
        if dash and int(last) < int(first):
            msg = f"{flag} {word}: the range ends before it begins."
            raise UsageError(msg)
        if int(last or first) - int(first) >= _MOST_IN_RANGE:
            msg = f"{flag} {word}: a range has at most {_MOST_IN_RANGE:,} numbers."
            raise UsageError(msg)
        found.update(dict.fromkeys(range(int(first), int(last or first) + 1)))
    return tuple(found)


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other."""
    own = [args.train, args.valid, args.test, args.entity_to_id, args.relation_to_id]
    if args.dataset and any(path is not None for path in own):
        msg = "--dataset brings its own files; give either --dataset or --train and --test."
        raise UsageError(msg)
    if args.loss == TARGET and args.triple_loss == ROW:
        msg = (
            "--loss target is the loss of one score; --triple-loss row chooses a part of the "
            "training loss. Leave one of them out."
        )
        raise UsageError(msg)
    if args.mode == "self" and (args.test_indices or args.max_test_triples):
        msg = "--mode self asks about training triples; leave --test-indices and the like out."
        raise UsageError(msg)
    if args.output_per_triple and (args.mode == "self" or not (args.output or args.csv_output)):
        msg = (
            "--output-per-triple writes a file for each test triple beside --output or "
            "--csv-output; give one of them, and a mode with test triples."
        )
        raise UsageError(msg)


def _definition(args: argparse.Namespace) -> dict[str, str]:
    """Return what the loss of a triple is; the usual one tells triples apart in mode self."""
    is_own = args.mode == "self" and args.triple_loss is None
    loss = args.loss or (TARGET if is_own else TRAINING)
    return {
        "loss": loss,
        "triple_loss": args.triple_loss or (TARGET if loss == TARGET else ROW),
        "sides": args.sides or (BOTH if args.mode == "self" else TAIL),
    }


def _layers(args: argparse.Namespace) -> int | tuple[str, ...] | None:
    """Return which parameters are compared."""
    if args.last_layer_names:
        return tuple(args.last_layer_names)
    if args.use_last_layers_only or args.num_last_layers:
        return int(args.num_last_layers or _USUAL_LAYERS)
    return None


def _notes(args: argparse.Namespace) -> list[str]:
    """Return a line for each flag that was given and has no effect."""
    return [
        f"--{name.replace('_', '-')} is not needed: {reason}."
        for name, reason in WITHOUT_EFFECT.items()
        if getattr(args, name)
    ]
