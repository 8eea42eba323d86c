"""What a saved plan asks of configuration files, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import ConfigFileError, PlanFileError
from memfit.journal.plain_text import read_plain
from memfit.journal.plain_yaml import parsed_yaml

_VERSION = 1
_SPLITTING = "micro-batching"
_PRECISIONS = ("bf16", "fp16", "pure-bf16")
_CHECKPOINTING = "activation-checkpointing"
_EIGHT_BIT = "eight-bit-optimizer"
_IMPLEMENTATION = "optimizer-implementation"
_ATTACH = "memfit.attach(model, optimizer, plan) does it in the program"
_OWN_LOOP = {
    "batchnorm-replay": "takes the statistics of the whole batch before its pieces",
    "cached-gradients": "computes the loss on the whole batch and goes through its pieces twice",
}
_ELSEWHERE = {
    "allocator-settings": "set PYTORCH_ALLOC_CONF where the process is started, or train with "
    "`memfit run`",
    "fused-attention": "it is an argument of the model, such as attn_implementation: sdpa",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """One strategy that is not written, and why."""

    strategy: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """A plan in the words of configuration files."""

    path: Path
    batch_size: int | None
    """The effective batch of the planned step on one device; None where the plan does not say."""
    micro_batch_size: int | None
    """Samples of one pass; None where the plan says nothing of it."""
    precision: str = ""
    checkpointing: bool = False
    checkpoints_some: bool = False
    """Whether the plan names blocks, or results that are kept."""
    optimizer: str = ""
    """``eight-bit`` or the name of an implementation."""
    left_out: tuple[LeftOut, ...] = ()
    reasons: tuple[str, ...] = ()
    """What the plan was proved with, and while what it holds."""


def read_plan_settings(path: Path) -> PlanSettings:
    """Read a plan.

    Raises:
        PlanFileError: if it is missing, or no plan.
        ConfigFileError: if no configuration can express it.
    """
    try:
        content = parsed_yaml(read_plain(path))
    except OSError as error:
        raise PlanFileError(str(path), error.strerror or "it cannot be opened") from None
    except ValueError as error:
        raise PlanFileError(str(path), f"it is no YAML ({error})") from None
    if not isinstance(content, dict) or content.get("memfit_plan") != _VERSION:
        raise PlanFileError(str(path), f"it does not say memfit_plan: {_VERSION}")
    strategies = {str(each["name"]): each for each in _strategies(content, path)}
    for name in strategies.keys() & _OWN_LOOP.keys():
        reason = (
            f"{name} {_OWN_LOOP[name]}, which gradient accumulation in a configuration does not "
            "do, so the results would change. Train with memfit.start, or plan with "
            f"--forbid {name}"
        )
        raise ConfigFileError(reason, path)
    for name in (each for each in _PRECISIONS if strategies.get(each, {}).get("keep")):
        reason = (
            f"{name} keeps {', '.join(map(str, strategies[name]['keep']))} out of autocast, which "
            "no configuration says. Train with memfit.start, or take keep out of the plan"
        )
        raise ConfigFileError(reason, path)
    prediction = content.get("prediction") or {}
    batch_size = prediction.get("batch_size")
    splitting = strategies.get(_SPLITTING, {})
    checkpointing = strategies.get(_CHECKPOINTING)
    implementation = strategies.get(_IMPLEMENTATION, {}).get("implementation", "")
    return PlanSettings(
        path=path,
        batch_size=batch_size,
        micro_batch_size=splitting.get("micro_batch_size", batch_size),
        precision=next((name for name in _PRECISIONS if name in strategies), ""),
        checkpointing=checkpointing is not None,
        checkpoints_some=bool(checkpointing and any(map(checkpointing.get, ("blocks", "keep")))),
        optimizer="eight-bit" if _EIGHT_BIT in strategies else implementation,
        left_out=tuple(_left_out(name) for name in strategies if not _is_written(name)),
        reasons=tuple(str(reason) for reason in content.get("reasons") or ()),
    )


def _is_written(name: str) -> bool:
    return name in {_SPLITTING, _CHECKPOINTING, _EIGHT_BIT, _IMPLEMENTATION, *_PRECISIONS}


def _left_out(name: str) -> LeftOut:
    return LeftOut(strategy=name, reason=_ELSEWHERE.get(name, f"no key stands for it; {_ATTACH}"))


def _strategies(content: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    """Check the strategies as far as it can be done without their classes.

    Raises:
        PlanFileError: if one has no name, or a setting is no number where one is needed.
    """
    found = content.get("strategies") or []
    if not isinstance(found, list) or not all(isinstance(e, dict) and "name" in e for e in found):
        raise PlanFileError(str(path), "each of its strategies needs a name")
    for each in found:
        size = each.get("micro_batch_size", 1)
        if type(size) is not int or size < 1:
            reason = f"micro_batch_size must be a whole number of at least 1, not {size!r}"
            raise PlanFileError(str(path), reason)
    return found
