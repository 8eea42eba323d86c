"""4-bit base: linear layers are frozen in 4 bits, and small adapters are trained beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import nn

from memfit.errors import MissingExtraError
from memfit.session.session import Session
from memfit.session.stand_ins import module_tensors
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.strategies.four_bit_base.packing import PackedBase, libraries, merged_state_dict
from memfit.trace.events import Category, Phase

ALL, PACKED = "all", "packed"
_PACKAGES = ("bitsandbytes", "peft")
_FEATURE, _EXTRA = "The 4-bit base", "four-bit"
_KINDS = ("nf4", "fp4")
_DTYPES = ("bfloat16", "float16", "float32")
_PACKS_WEIGHTS = "the weights that it would act on are packed into 4 bits and frozen"

__all__ = ["FourBitBase", "merged_state_dict"]
_BASE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PACKED = "Params4bit"


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
        words = (
            ("quant_type", _KINDS),
            ("compute_dtype", _DTYPES),
            ("freezes", (ALL, PACKED)),
        )
        for name, known in words:
            if (value := getattr(self, name)) not in known:
                msg = f"{name} must be one of {', '.join(known)}, not {value!r}"
                raise ValueError(msg)
        # Both look for GPUs when they are first imported, and there may be a virtual one later.
        if all(find_spec(each) for each in _PACKAGES):
            libraries()

    @property
    def _choice(self) -> _LayerChoice:
        return _LayerChoice(targets=self.targets, kept=self.kept, only=self.only)

    @classmethod
    def own_facts(cls, session: Session) -> _BaseFacts:
        """Look for linear layers, and for what keeps them from being packed."""
        return _base_facts(session)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse what cannot be packed, and what is packed or adapted already."""
        for package in _PACKAGES:
            if not find_spec(package):
                return f"{MissingExtraError(_FEATURE, package, _EXTRA)}."
        return facts.of(_BaseFacts).obstacle(self._choice)

    def apply(self, session: Session) -> Undo:
        """Pack the linear layers, add adapters, and have the optimizer train what is not frozen."""
        layers = _base_facts(session).packed(self._choice)
        with ExitStack() as undos:
            base = PackedBase(session.model, session.optimizer, freezes_rest=self.freezes == ALL)
            undos.callback(base.undo)
            settings = {
                "quant_type": self.quant_type,
                "compress_statistics": self.double_quantisation,
                "compute_dtype": getattr(torch, self.compute_dtype),
            }
            base.pack(layers, settings)
            targets = _named(layers, self.targets) if self.targets else layers
            base.adapt(targets, rank=self.rank, alpha=self.alpha)
            base.train_adapters()
            return undos.pop_all().close


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerChoice:
    """Choose linear layers by name."""

    targets: tuple[str, ...] = ()
    """Those that get an adapter; all packed ones by default."""
    kept: tuple[str, ...] = ()
    """Those that stay plain."""
    only: tuple[str, ...] = ()
    """Modules inside which layers are packed; the whole model by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BaseFacts:
    """Name a model's linear layers, and what keeps some or all of them from being packed."""

    layers: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    """Layers whose weight another module holds as well."""
    untrained: tuple[str, ...] = ()
    """Layers whose weight the optimizer does not hold."""
    other_dtypes: tuple[str, ...] = ()
    adapted: str = ""
    """A module that is an adapter, or that is packed."""

    def packed(self, choice: _LayerChoice) -> tuple[str, ...]:
        """Name the layers that are packed."""
        left = _named(self.layers, choice.kept)
        inside = _inside(self.layers, choice.only) if choice.only else self.layers
        return tuple(name for name in inside if name not in left)

    def obstacle(self, choice: _LayerChoice) -> str | None:
        """Say what stands in the way of packing."""
        if self.adapted:
            return f"{self.adapted} is an adapter or packed already; add adapters to a plain model."
        return self._unnamed(choice) or self._unpackable(choice.targets, self.packed(choice))

    def _unnamed(self, choice: _LayerChoice) -> str | None:
        """Say which words name no layer that they could be for."""
        targets, kept, packed = choice.targets, choice.kept, self.packed(choice)
        for word in choice.only:
            if not _inside(self.layers, (word,)):
                return f"the model has no torch.nn.Linear inside a module called {word}."
        if not packed:
            return "the model has no torch.nn.Linear whose weight could be packed."
        if "" in packed:
            return "the model itself is a torch.nn.Linear that nothing holds; wrap it in a module."
        for word in (*targets, *kept):
            if not _named(self.layers, (word,)):
                return f"the model has no torch.nn.Linear called {word}."
        if targets and not _named(packed, targets):
            return "all layers that targets names are kept as they are, without adapters."
        return None

    def _unpackable(self, targets: tuple[str, ...], packed: tuple[str, ...]) -> str | None:
        """Say why layers cannot be packed, or need not be."""
        if tied := [name for name in self.tied if name in packed]:
            return (
                f"{tied[0]} shares its weight with another module, which needs it whole; keep the "
                f"layer as it is with kept: [{tied[0].rpartition('.')[2]}]."
            )
        if self.other_dtypes:
            return (
                f"bitsandbytes packs float32, bfloat16 and float16, not {self.other_dtypes[0]}. "
                "To verify a plan, compare in float32: memfit.verify(..., dtype=torch.float32)."
            )
        untrained = set(self.untrained)
        adapted = _named(packed, targets) if targets else packed
        if all(name in untrained for name in adapted):
            return "the optimizer trains none of the weights that adapters would lie beside."
        return None


def _named(layers: Iterable[str], words: tuple[str, ...]) -> tuple[str, ...]:
    """Choose layers by their names, or the ends of these."""
    return tuple(
        name for name in layers if any(name == word or name.endswith(f".{word}") for word in words)
    )


def _inside(layers: Iterable[str], modules: tuple[str, ...]) -> tuple[str, ...]:
    """Choose layers by the names of modules that hold them, or of themselves."""
    return tuple(
        name
        for name in layers
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    )


def _base_facts(session: Session) -> _BaseFacts:
    """Look at the linear layers of a session's model."""
    layers = {
        name: module for name, module in session.model.named_modules() if type(module) is nn.Linear
    }
    held = Counter(id(tensor) for _, tensor in module_tensors(session.model))
    groups = session.optimizer.param_groups
    trained = {id(each) for group in groups for each in group["params"]}
    dtypes = {layer.weight.dtype for layer in layers.values()} - set(_BASE_DTYPES)
    return _BaseFacts(
        layers=tuple(layers),
        tied=tuple(name for name, layer in layers.items() if held[id(layer.weight)] > 1),
        untrained=tuple(name for name, layer in layers.items() if id(layer.weight) not in trained),
        other_dtypes=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        adapted=_adapted(session.model),
    )


def _adapted(model: nn.Module) -> str:
    """Name a module that PEFT or bitsandbytes has made; nothing where there is none."""
    for name, module in model.named_modules():
        is_packed = any(type(each).__name__ == _PACKED for each in module._parameters.values())
        if is_packed or hasattr(module, "lora_A") or hasattr(module, "peft_config"):
            return name or type(module).__name__
    return ""
