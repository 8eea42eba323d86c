"""4-bit base: linear layers are frozen in 4 bits, and small adapters are trained beside them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch

from memfit.errors import MissingExtraError
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.strategies.four_bit_base.base_facts import (
    BaseFacts,
    LayerChoice,
    base_facts,
    named,
)
from memfit.strategies.four_bit_base.packing import PackedBase, libraries, merged_state_dict
from memfit.trace.events import Category, Phase

ALL, PACKED = "all", "packed"
_PACKAGES = ("bitsandbytes", "peft")
_FEATURE, _EXTRA = "The 4-bit base", "four-bit"
_KINDS = ("nf4", "fp4")
_DTYPES = ("bfloat16", "float16", "float32")
_PACKS_WEIGHTS = "the weights that it would act on are packed into 4 bits and frozen"

__all__ = ["FourBitBase", "merged_state_dict"]


@dataclass(frozen=True, kw_only=True)
class FourBitBase(Strategy):
    """Freeze a model with its linear layers in 4 bits, and train adapters beside these (QLoRA).

    Weights take half a byte per value, with double quantisation 0.016 more for scales; each is
    unpacked to the compute type for its product in forward, and again in backward. The job's
    optimizer trains the adapters in the groups of the weights beside which they lie, with their
    settings; all other parameters are frozen, unless ``freezes`` is ``packed``: then only packed
    weights are, and the rest is trained as it was. ``only`` names modules inside which layers are
    packed. Adapters are PEFT's, so ``peft`` can save and load them. Closing the run unpacks the
    weights and merges the adapters into them.

    Limits: another training problem, with other parameters, whose solution is another. Output
    layers whose weight an embedding shares, models with adapters or packed weights, and optimizers
    that choose parameters by name are refused; ``kept`` names layers that stay as they are. Code
    that reads a layer's weight itself finds a packed one. Optimizer states of weights that become
    frozen are dropped. Checkpoints of a run are not loaded into another; save the adapters.
    Source: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314; nn/modules.py of
    bitsandbytes 0.50.
    """

    rank: int = 16
    alpha: int = 32
    targets: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    freezes: str = ALL
    quant_type: str = "nf4"
    double_quantisation: bool = True
    compute_dtype: str = "bfloat16"

    name: ClassVar[str] = "four-bit-base"
    numerics: ClassVar[Numerics] = Numerics.DIFFERENT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL, Seam.OPTIMIZER})
    not_with_shards: ClassVar[str] = "it packs whole weights, of which a rank has a part"
    acts_on: ClassVar[Mapping[Category, float]] = dict.fromkeys(Category, 1.0)
    acts_in: ClassVar[tuple[Phase, ...]] = tuple(Phase)
    quiet_settings: ClassVar[frozenset[str]] = frozenset(
        {
            *("alpha", "compute_dtype", "double_quantisation", "freezes", "kept", "only"),
            *("quant_type", "targets"),
        }
    )
    excludes: ClassVar[Mapping[str, str]] = {
        "pure-bf16": _PACKS_WEIGHTS,
        "linear-cross-entropy": _PACKS_WEIGHTS,
    }

    def __post_init__(self) -> None:
        self.check_at_least(1, "rank", "alpha")
        words = (("quant_type", _KINDS), ("compute_dtype", _DTYPES), ("freezes", (ALL, PACKED)))
        for name, known in words:
            if (value := getattr(self, name)) not in known:
                msg = f"{name} must be one of {', '.join(known)}, not {value!r}"
                raise ValueError(msg)
        # Both look for GPUs when they are first imported, and there may be a virtual one later.
        if all(find_spec(each) for each in _PACKAGES):
            libraries()

    @property
    def _choice(self) -> LayerChoice:
        return LayerChoice(targets=self.targets, kept=self.kept, only=self.only)

    @classmethod
    def own_facts(cls, session: Session) -> BaseFacts:
        """Look for linear layers, and for what keeps them from being packed."""
        return base_facts(session)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse what cannot be packed, and what is packed or adapted already."""
        for package in _PACKAGES:
            if not find_spec(package):
                return f"{MissingExtraError(_FEATURE, package, _EXTRA)}."
        return facts.of(BaseFacts).obstacle(self._choice)

    def apply(self, session: Session) -> Undo:
        """Pack the linear layers, add adapters, and have the optimizer train what is not frozen."""
        layers = base_facts(session).packed(self._choice)
        with ExitStack() as undos:
            base = PackedBase(session.model, session.optimizer, freezes_rest=self.freezes == ALL)
            undos.callback(base.undo)
            settings = {
                "quant_type": self.quant_type,
                "compress_statistics": self.double_quantisation,
                "compute_dtype": getattr(torch, self.compute_dtype),
            }
            base.pack(layers, settings)
            targets = named(layers, self.targets) if self.targets else layers
            base.adapt(targets, rank=self.rank, alpha=self.alpha)
            base.train_adapters()
            return undos.pop_all().close
