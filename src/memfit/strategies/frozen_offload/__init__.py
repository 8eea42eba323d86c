"""Frozen offload: weights that are not trained wait on the host or on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor

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
from memfit.strategies.frozen_offload.visits import STRATEGY, HostWeight, VisitedBlock
from memfit.strategies.recomputation import recomputed
from memfit.trace.events import Category
from memfit.trace.subclasses import known_parts_of
from memfit.units import KIB

_WHAT = "frozen weights"
_FEWEST_TO_HALVE = 4
_RUN_AGAIN = "parts of blocks run again in backward, after the block's weights have left the device"
_PLAIN = (torch.nn.Parameter, FakeTensor)
_HOOK_OF_ACCELERATE = "_hf_hook"


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
    def own_facts(cls, session: Session) -> _FrozenFacts:
        """Look for frozen weights."""
        return frozen_facts(session.model)

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer the first half of the blocks, and all; to the host before the disk."""
        if not facts.block_levels or not facts.of(_FrozenFacts).weights:
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
        found = facts.of(_FrozenFacts)
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
        self, session: Session, weights: Sequence[_FrozenWeight], undos: ExitStack
    ) -> list[tuple[_FrozenWeight, HostWeight]]:
        """Move weights out, one after the other."""
        spill = session.spill
        memory: HostMemory = (
            MappedFile(spill, _WHAT)
            if self.to == DISK
            else PinnedMemory(spill, _WHAT, pins=session.device_type != CPU)
        )
        moved: list[tuple[_FrozenWeight, HostWeight]] = []
        for each in weights:
            parameter = session.model.get_parameter(each.name)
            is_there = parameter.device.type == session.device_type
            device = parameter.device if is_there else torch.device(session.device_type)
            holders = [
                (module, key)
                for module in session.model.modules()
                for key, held in module._parameters.items()
                if held is parameter
            ]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _FrozenWeight:
    """A parameter that no gradient is wanted of: who holds it, and why it could not be moved."""

    name: str
    modules: tuple[str, ...]
    """The names of all modules that hold it."""
    num_bytes: int
    obstacle: str = ""
    """A clause that says why it has to stay; empty where it need not."""

    def lies_inside(self, blocks: Iterable[str]) -> bool:
        """Return whether nothing outside of some blocks holds it."""
        inside = [*blocks]
        return all(any(_is_in(module, block) for block in inside) for module in self.modules)

    def is_used_by(self, block: str) -> bool:
        """Return whether a module of a block holds it."""
        return any(_is_in(module, block) for module in self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FrozenFacts:
    """Name a model's frozen weights, and what moves weights already."""

    weights: tuple[_FrozenWeight, ...] = ()
    aliases: tuple[tuple[str, ...], ...] = ()
    """The names of modules that have several, the one that others know them by first."""
    hooked: str = ""
    """A module whose weights accelerate's hooks bring in."""

    def movable(self, blocks: Sequence[str], min_tensor_bytes: int) -> tuple[_FrozenWeight, ...]:
        """Return the weights that some blocks can do without while they do not compute."""
        return tuple(
            each
            for each in self._inside(blocks)
            if not each.obstacle and each.num_bytes >= min_tensor_bytes
        )

    def obstacle(self, blocks: Sequence[str], min_tensor_bytes: int) -> str | None:
        """Say why nothing in some blocks can be moved; None if something can."""
        if self.hooked:
            return (
                f"hooks of accelerate act on {self.hooked} already, as a device map has them; load "
                "the model without one."
            )
        if not self.weights:
            return (
                "all weights require gradients, and one that is trained cannot wait elsewhere: "
                "gradients would go to copies that are thrown away. Freeze weights with "
                "requires_grad_(False), as PEFT does beside adapters."
            )
        if self.movable(blocks, min_tensor_bytes):
            return None
        inside = self._inside(blocks)
        if not inside:
            return "no frozen weight belongs to the blocks alone; name the blocks that hold some."
        if reasons := [each for each in inside if each.obstacle]:
            return f"{reasons[0].name} cannot be moved: {reasons[0].obstacle}."
        largest = max(each.num_bytes for each in inside)
        return (
            f"the largest frozen weight of the blocks has {largest} bytes, and min_tensor_bytes "
            f"is {min_tensor_bytes}."
        )

    def _inside(self, blocks: Sequence[str]) -> list[_FrozenWeight]:
        """Return the weights that nothing outside of some blocks holds."""
        names = [*blocks, *(name for names in self.aliases if names[0] in blocks for name in names)]
        return [each for each in self.weights if each.lies_inside(names)]


def frozen_facts(model: torch.nn.Module) -> _FrozenFacts:
    """Look for the frozen weights of a model."""
    parameters: dict[int, tuple[str, torch.Tensor]] = {}
    modules: dict[int, list[str]] = {}
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        for key, parameter in module.named_parameters(recurse=False):
            parameters.setdefault(id(parameter), (f"{name}.{key}".lstrip("."), parameter))
            modules.setdefault(id(parameter), []).append(name)
    users = _users_of_storages([tensor for _, tensor in parameters.values()], model)
    found = [
        _FrozenWeight(
            name=name,
            modules=tuple(modules[key]),
            num_bytes=parameter.nbytes,
            obstacle=_obstacle(parameter, users),
        )
        for key, (name, parameter) in parameters.items()
        if not parameter.requires_grad
    ]
    aliases = tuple(tuple(each) for each in names.values() if len(each) > 1)
    return _FrozenFacts(weights=tuple(found), aliases=aliases, hooked=_hooked(model))


def _users_of_storages(parameters: Iterable[torch.Tensor], model: torch.nn.Module) -> Counter[int]:
    """Count the parameters and buffers that lie in each storage."""
    tensors = {id(each): each for each in (*parameters, *model.buffers())}
    return Counter(
        part.untyped_storage()._cdata for each in tensors.values() for part in known_parts_of(each)
    )


def _obstacle(parameter: torch.Tensor, users: Counter[int]) -> str:
    """Say why a parameter has to stay where it is; nothing if it need not."""
    if type(parameter) not in _PLAIN:
        return f"it is a {type(parameter).__name__}, not a plain parameter"
    if parameter.layout is not torch.strided:
        return "it is not strided"
    if parameter.is_meta and not isinstance(parameter, FakeTensor):
        return "it is on the meta device, which holds no values"
    storage = parameter.untyped_storage()
    if users[storage._cdata] > 1 or storage.nbytes() != parameter.nbytes:
        return "it shares its memory with other tensors"
    if parameter.grad is not None:
        return "it has a gradient all the same"
    return ""


def _hooked(model: torch.nn.Module) -> str:
    """Name a module that accelerate has put a hook on; nothing where there is none."""
    for name, module in model.named_modules():
        if hasattr(module, _HOOK_OF_ACCELERATE):
            return name or type(module).__name__
    return ""


def _is_in(module: str, block: str) -> bool:
    return module == block or module.startswith(f"{block}.")
