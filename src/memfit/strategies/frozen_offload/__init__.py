"""Frozen offload: weights that are not trained wait on the host or on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch

from memfit.devices.spec import CPU
from memfit.errors import StrategyError
from memfit.session.block_levels import block_levels
from memfit.session.block_names import expand_names, shorten_names
from memfit.session.forwards import replace_forward, without_generation_caches
from memfit.session.host_tensors import HostMemory, MappedFile, PinnedMemory
from memfit.session.session import Session
from memfit.strategies.base import (
    DISK,
    HOST,
    AbstractBlockwise,
    AbstractOffload,
    Numerics,
    Seam,
    Undo,
)
from memfit.strategies.facts import JobFacts, shared_facts
from memfit.strategies.frozen_offload.frozen_weights import (
    FrozenFacts,
    FrozenWeight,
    frozen_facts,
    holders_of,
)
from memfit.strategies.frozen_offload.visits import STRATEGY, HostWeight, VisitedBlock
from memfit.strategies.recomputation import recomputed
from memfit.trace.events import Category
from memfit.units import KIB

_WHAT = "frozen weights"
_FEWEST_TO_HALVE = 4
_RUN_AGAIN = "parts of blocks run again in backward, after the block's weights have left the device"


@dataclass(frozen=True, kw_only=True)
class FrozenOffload(AbstractOffload, AbstractBlockwise):
    """Keep the frozen weights of blocks off the device, but for the block that computes.

    ``blocks`` are names of modules, a range of numbered siblings being written ``layers.0-11``;
    none at all means the repeated blocks of the outermost level. ``to`` is ``host`` (pinned memory,
    for training on a GPU) or ``disk`` (a file that is mapped into memory, so that the system keeps
    of it what there is room for). A block's frozen weights come to the device when its forward
    begins and leave when it ends. The blocks are recomputed in backward, where the weights come
    once more and stay until backward is through the block; without that, autograd would hold on to
    every copy and nothing would be saved. Parameters stay the same objects, so optimizers,
    checkpoints and ``state_dict`` find values at any time.

    Stays on the device: weights that are trained, buffers, what is smaller than
    ``min_tensor_bytes``, weights that modules outside of the blocks hold too (tied embeddings),
    and those that share memory with other tensors.

    Limits: nothing is computed while weights move, twice per step and micro-batch. Pinned memory
    comes in powers of two. A frozen weight of a block that is read from outside of the block's
    forward is found on the host: a GPU refuses that, the CPU computes with it. A block that
    recomputes parts of itself is refused by a GPU in the same way. A forward that writes to frozen
    weights is refused.
    Source: the hooks of Accelerate, https://huggingface.co/docs/accelerate/concept_guides/
    big_model_inference, do so for inference; blocks are run again after Chen et al. 2016,
    https://arxiv.org/abs/1604.06174.
    """

    min_tensor_bytes: int = 64 * KIB

    name: ClassVar[str] = STRATEGY
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL})
    not_with_shards: ClassVar[str] = "it moves whole weights, and ranks hold shards of them"
    acts_on: ClassVar[Mapping[Category, float]] = {
        Category.PARAMETERS: 1.0,
        Category.SAVED_ACTIVATIONS: 1.0,
        Category.TEMPORARIES: 1.0,
    }
    never_faster: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "four-bit-base": "the weights that it would move are packed into 4 bits",
        "tiling": _RUN_AGAIN,
        "batchnorm-replay": (
            "replay stops forward passes half way, inside blocks that run as a whole"
        ),
    }

    @classmethod
    def own_facts(cls, session: Session) -> FrozenFacts:
        """Look for frozen weights."""
        return frozen_facts(session.model)

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer the first half of the blocks, and all; to the host before the disk."""
        if not facts.block_levels or not facts.of(FrozenFacts).weights:
            return
        blocks = facts.block_levels[0]
        whole = cls(to=DISK if facts.device_type == CPU else HOST)
        if len(blocks) >= _FEWEST_TO_HALVE:
            yield replace(whole, blocks=shorten_names(blocks[: len(blocks) // 2]))
        yield whole
        if whole.to == HOST:
            yield replace(whole, to=DISK)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse the host where it is the device, and blocks without frozen weights."""
        if reason := super().obstacle(facts):
            return reason
        found = facts.of(FrozenFacts)
        return found.obstacle(self.block_names(facts), self.min_tensor_bytes)

    def stays(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        """Return the weights that are moved, so that they never need to fit on a GPU together."""
        levels = block_levels(model)
        if not (self.blocks or levels):
            return ()
        known = tuple(name for name, _ in model.named_modules() if name)
        names = expand_names(self.blocks, known) if self.blocks else levels[0]
        found = frozen_facts(model).movable(names, self.min_tensor_bytes)
        return [model.get_parameter(each.name) for each in found]

    def apply(self, session: Session) -> Undo:
        """Move the weights out, and have each block bring its own in."""
        names = self.block_names(shared_facts(session))
        found = frozen_facts(session.model)
        if reason := found.obstacle(names, self.min_tensor_bytes):
            raise StrategyError(self.name, reason)
        with ExitStack() as undos:
            undos.enter_context(without_generation_caches(session.model))
            weights = self._moved(session, found.movable(names, self.min_tensor_bytes), undos)
            for name in names:
                own = [each for path, each in weights if path.is_used_by(name)]
                if own:
                    undos.callback(_visited(session.model, name, own))
            return undos.pop_all().close

    def _moved(
        self, session: Session, weights: Sequence[FrozenWeight], undos: ExitStack
    ) -> list[tuple[FrozenWeight, HostWeight]]:
        """Move weights out, one after the other."""
        spill = session.spill
        memory: HostMemory = (
            MappedFile(spill, _WHAT)
            if self.to == DISK
            else PinnedMemory(spill, _WHAT, pins=session.device_type != CPU)
        )
        moved: list[tuple[FrozenWeight, HostWeight]] = []
        for each in weights:
            parameter = session.model.get_parameter(each.name)
            is_there = parameter.device.type == session.device_type
            device = parameter.device if is_there else torch.device(session.device_type)
            holders = holders_of(parameter, session.model)
            weight = HostWeight(parameter, each.name, holders, host=memory, spill=spill)
            undos.callback(weight.come_back)
            weight.leave(device)
            moved.append((each, weight))
        if session.device_type != CPU:
            torch.cuda.empty_cache()  # what they have left would stay reserved
        return moved


def _visited(model: torch.nn.Module, name: str, weights: Sequence[HostWeight]) -> Undo:
    """Have a block's weights visit while it computes."""
    block = model.get_submodule(name)
    again = partial(recomputed, reached={name: block}, strategy=STRATEGY)
    return replace_forward(block, VisitedBlock(name, block.forward, again, weights))
