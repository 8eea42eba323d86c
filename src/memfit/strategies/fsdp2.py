"""FSDP2: ranks hold shards of parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from memfit.errors import StrategyError
from memfit.session.block_levels import block_levels
from memfit.session.block_names import expand_names
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Strategy, Undo
from memfit.strategies.data_parallel import AbstractDataParallel, give_all_the_same
from memfit.strategies.facts import JobFacts

_DTYPES = ("", "bfloat16", "float16")
_ALL, _WHOLE = 0, 1
_OWN_PLACES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, kw_only=True)
class Fsdp2(AbstractDataParallel):
    """Shard parameters, gradients and optimizer states over ranks; gather a block at a time.

    ``blocks`` are gathered one by one, the repeated blocks of the outermost level if none are
    named; what lies outside of them is gathered with the model. ``shards_after_forward`` says over
    how many ranks a block is split again after forward: 0 means all, and 1 keeps it whole until
    backward.
    ``shard_ranks`` makes groups of so many ranks that shard among them, and average between them
    (HSDP); 0 means one group of all. ``param_dtype`` is what blocks are gathered and computed in,
    with gradients reduced in float32. ``reduces_once`` keeps whole gradients until the last
    micro-batch, so that they are reduced once. ``offloads`` keeps shards, with their gradients and
    states, on the host. The ranks begin with the parameters of rank 0. A mean is weighted by the
    samples of each rank, a ``Total`` by its count.

    Limits: every rank runs as many passes as the one that needs most, and needs as many samples.
    Code that reads a parameter outside of its module's forward finds a shard. Offloaded shards are
    updated by the host's processor, whose time is not predicted, nor is the host's memory.
    Source: ``fully_shard`` of torch.distributed.fsdp, torch 2.13; Zhao et al. 2023,
    https://arxiv.org/abs/2304.11277, section 3.
    """

    blocks: tuple[str, ...] = ()
    shards_after_forward: int = _ALL
    shard_ranks: int = 0
    param_dtype: str = ""
    reduces_once: bool = False
    offloads: bool = False

    name: ClassVar[str] = "fsdp2"
    goes_with_shards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_at_least(0, "shards_after_forward", "shard_ranks")
        if self.param_dtype not in _DTYPES:
            known = ", ".join(each for each in _DTYPES if each)
            msg = f"param_dtype must be one of {known}, or empty, not {self.param_dtype!r}"
            raise ValueError(msg)

    @classmethod
    def choices(cls, num_ranks: int, device_type: str) -> Iterator[Self]:
        """Offer the usual settings: blocks split again after forward, or kept whole."""
        del num_ranks, device_type
        yield cls(shards_after_forward=_WHOLE)
        yield cls()

    def label(self) -> str:
        """Write the settings that are not the usual ones, each with its name."""
        usual = type(self)().settings()
        texts = [
            f"{key}={' '.join(value) if isinstance(value, tuple) else value}"
            for key, value in self.settings().items()
            if value != usual[key]
        ]
        return f"{self.name}({', '.join(texts)})" if texts else self.name

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Computing in fewer bits is approximate."""
        return self.least_numerics

    @property
    def least_numerics(self) -> Numerics:
        """Round what is gathered in another type."""
        return Numerics.APPROXIMATE if self.param_dtype else self.numerics

    def refuses(self, strategy: type[Strategy]) -> str | None:
        """Leave out what was not shown to keep the results of shards."""
        if strategy.goes_with_shards:
            return None
        return f"the ranks exchange shards of the model, and {strategy.not_with_shards}."

    def share(self, model: torch.nn.Module, device_type: str) -> None:
        """Shard the blocks, then what is left.

        Raises:
            StrategyError: if a module holds a parameter where it could not be replaced.
            ValueError: if the model has no such block, or ranks do not make groups of that size.
        """
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # takes a second

        if (held := _held_elsewhere(model)) is not None:
            reason = (
                f"{held} holds a parameter besides that of its module, where torch would not find "
                "the gathered one (recurrent layers do). Take ddp."
            )
            raise StrategyError(self.name, reason)
        give_all_the_same(model, device_type)
        options = self._options(device_type)
        for name in self._names(model):
            fully_shard(model.get_submodule(name), **options)
        fully_shard(model, **options)

    def apply(self, session: Session) -> Undo:
        """Have gradients reduced with the last micro-batch alone, where that is wanted."""
        undo = super().apply(session)
        if not self.reduces_once:
            return undo
        model: Any = session.model
        return session.replace(before_piece=model.set_requires_gradient_sync)

    def _names(self, model: torch.nn.Module) -> list[str]:
        if not self.blocks:
            levels = block_levels(model)
            return list(levels[0]) if levels else []
        return expand_names(self.blocks, tuple(name for name, _ in model.named_modules() if name))

    def _options(self, device_type: str) -> dict[str, Any]:
        """Return what ``fully_shard`` is given."""
        from torch.distributed import fsdp  # noqa: PLC0415

        options: dict[str, Any] = {"mesh": self._mesh(device_type)}
        after = {_ALL: True, _WHOLE: False}
        options["reshard_after_forward"] = after.get(
            self.shards_after_forward, self.shards_after_forward
        )
        if self.param_dtype:
            options["mp_policy"] = fsdp.MixedPrecisionPolicy(
                param_dtype=getattr(torch, self.param_dtype), reduce_dtype=torch.float32
            )
        if self.offloads:
            options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=device_type != "cpu")
        return options

    def _mesh(self, device_type: str) -> Any:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

        num_ranks = torch.distributed.get_world_size()
        if self.shard_ranks in {0, num_ranks}:
            return init_device_mesh(device_type, (num_ranks,))
        if num_ranks % self.shard_ranks:
            msg = f"{num_ranks} ranks do not make groups of {self.shard_ranks} that shard"
            raise ValueError(msg)
        shape = (num_ranks // self.shard_ranks, self.shard_ranks)
        return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def _held_elsewhere(model: torch.nn.Module) -> str | None:
    """Name an attribute that holds parameters of a model besides the modules' own places."""
    known = {id(each) for each in model.parameters()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _OWN_PLACES:
                continue
            values = value.values() if isinstance(value, dict) else value
            held = values if isinstance(value, (list, tuple, dict)) else (value,)
            if any(id(each) in known for each in held):
                return f"{name}.{key}".removeprefix(".")
    return None
