"""8-bit optimizer: the optimizer's states are kept in 8 bits per value, in blocks with a scale."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from memfit.errors import MissingExtraError
from memfit.session.optimizer_facts import TORCH
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.trace.events import Category, Phase

_LIBRARY = "bitsandbytes"
_MISSING = MissingExtraError("The 8-bit optimizer", _LIBRARY, "eight-bit")
_DTYPES = ("bfloat16", "float16", "float32")
_LACKED_BY_ALL = frozenset({"capturable", "differentiable", "lr as a tensor", "maximize"})
_LACKED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "Adam": _LACKED_BY_ALL | {"amsgrad"},
        "AdamW": _LACKED_BY_ALL | {"amsgrad"},
        "SGD": _LACKED_BY_ALL | {"dampening", "nesterov"},
    }
)
"""The optimizers that have an 8-bit version, and the settings that it does not have."""


@dataclass(frozen=True, kw_only=True)
class EightBitOptimizer(Strategy):
    """Put bitsandbytes' 8-bit version in the place of a torch Adam, AdamW or SGD with momentum.

    States take one byte per value, and one fp32 scale per 256 values, instead of four bytes per
    value. For an update they are turned into fp32 and back. Hyper-parameters and parameter groups
    stay as they are. Tensors of fewer than 4096 values keep fp32 states, and so do parameters for
    which bitsandbytes' GlobalOptimManager was told so, as its StableEmbedding does; it remembers
    them by their place among the parameters, for the rest of the process.

    Limits: approximate; a state is rounded to 8 bits relative to the largest of its block.
    Embeddings suffer most from it; bitsandbytes advises StableEmbedding for them. Settings that
    the 8-bit version lacks are refused, and so is Adam with weight_decay, which bitsandbytes takes
    as AdamW does. Schedulers and hooks belong on ``run.optimizer``. A checkpoint is continued under
    a plan that has this strategy just where it was saved under one. Parameters in other layouts,
    such as channels-last, become contiguous. On the CPU an update takes fp32 temporaries of five
    times one parameter.
    Source: Dettmers et al. 2022, https://arxiv.org/abs/2110.02861, section 2; bitsandbytes'
    settings: https://huggingface.co/docs/bitsandbytes/main/en/optimizers.
    """

    name: ClassVar[str] = "eight-bit-optimizer"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.OPTIMIZER})
    not_with_shards: ClassVar[str] = (
        "bitsandbytes updates plain tensors, and its blocks of 256 values would lie otherwise in "
        "shards"
    )
    acts_on: ClassVar[Mapping[Category, float]] = {
        Category.OPTIMIZER_STATE: 0.75,
        Category.TEMPORARIES: 1.0,
    }
    acts_in: ClassVar[tuple[Phase, ...]] = (Phase.OPTIMIZER,)
    excludes: ClassVar[Mapping[str, str]] = {
        "optimizer-implementation": "the 8-bit optimizer has one implementation, its own"
    }

    def __post_init__(self) -> None:
        # The library looks for GPUs when it is first imported. That must not happen while a step
        # is recorded, where there may be a virtual one.
        if find_spec(_LIBRARY):
            _library()

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse optimizers without an 8-bit version that does the same."""
        if not find_spec(_LIBRARY):
            return f"{_MISSING}."
        return _lack(facts) or _surroundings(facts)

    def apply(self, session: Session) -> Undo:
        """Put the 8-bit optimizer in the place of the job's own.

        Raises:
            MissingExtraError: if bitsandbytes is not installed.
        """
        return session.replace(optimizer=_eight_bit(session.optimizer))


def _lack(facts: JobFacts) -> str | None:
    """Return what keeps an optimizer from having an 8-bit version that does the same."""
    options = set(facts.optimizer_options)
    if facts.optimizer not in _LACKED or facts.optimizer_package != TORCH:
        return (
            f"bitsandbytes has no 8-bit version of {facts.optimizer} that does the same; it has "
            "one of torch.optim's Adam, AdamW and SGD with momentum."
        )
    if lacked := sorted(_LACKED[facts.optimizer] & options):
        return f"the 8-bit {facts.optimizer} of bitsandbytes has no {', '.join(lacked)}."
    if facts.optimizer == "SGD" and "momentum" not in options:
        return "SGD without momentum keeps no states that could be smaller."
    is_coupled = facts.optimizer == "Adam" and "decoupled_weight_decay" not in options
    if is_coupled and "weight_decay" in options:
        return (
            "Adam decays weights through the gradient, its 8-bit version apart from it; take "
            "torch.optim.AdamW, which decays them apart as well, or weight_decay=0."
        )
    return None


def _surroundings(facts: JobFacts) -> str | None:
    """Return what else stands in the way of replacing the job's optimizer."""
    if foreign := [dtype for dtype in facts.parameter_dtypes if dtype not in _DTYPES]:
        return (
            f"bitsandbytes updates parameters of type {', '.join(_DTYPES)}, not {foreign[0]}. "
            "To verify a plan, compare in float32: memfit.verify(..., dtype=torch.float32)."
        )
    if facts.optimizer_attachments:
        return (
            f"the job's optimizer has a {facts.optimizer_attachments[0]}, which its 8-bit version "
            "would go without; attach it to run.optimizer instead."
        )
    return None


def _eight_bit(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Build the 8-bit version of an optimizer, over the same parameters."""
    kind = type(optimizer).__name__
    defaults, groups = optimizer.defaults, [dict(group) for group in optimizer.param_groups]
    if kind == "SGD":
        for group in groups:
            group.update(betas=(group["momentum"], 0.0), eps=0.0)
        settings = {"momentum": max(group["momentum"] for group in groups)}
    else:
        settings = {name: defaults[name] for name in ("betas", "eps")}
    settings |= {name: defaults[name] for name in ("lr", "weight_decay")}
    built: torch.optim.Optimizer = getattr(_library().optim, f"{kind}8bit")(groups, **settings)
    return built


def _library() -> Any:
    """Import bitsandbytes.

    Raises:
        MissingExtraError: if it is not installed.
    """
    log = logging.getLogger(_LIBRARY)
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of missing 4-bit kernels, which are not needed here
    try:
        return import_module(_LIBRARY)
    except ImportError:
        raise _MISSING from None
    finally:
        log.setLevel(level)
