"""Host modules: named modules compute on the host, the rest of the model on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from memfit.devices.spec import CPU
from memfit.errors import StrategyError
from memfit.session.block_names import expand_names
from memfit.session.forwards import replace_forward
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts, shared_facts
from memfit.strategies.host_modules.crossing import SCALED, STRATEGY, Crossing, HostForward
from memfit.strategies.host_modules.weights import (
    HostFacts,
    host_facts,
    move_to_host,
    tensors_of,
)
from memfit.trace.events import Category

_OF_ONE_DEVICE = "it was shown to update parameters of one device alone"
_ALSO_MOVES = "both say where the same weights lie"
_RANKS = "what ranks exchange has to lie on their devices"


@dataclass(frozen=True, kw_only=True)
class HostModules(Strategy):
    """Compute named modules on the host, and the rest of the model on the device.

    ``modules`` are names, a range of numbered siblings being written ``layers.0-11``. Their
    parameters, buffers, gradients and optimizer states lie on the host, and what they keep for
    backward does. The tensors among their inputs are copied to the host and those that they give
    to the device; autograd sends gradients the same way back. Under autocast they compute in the
    types of their weights.

    Limits: the device waits for every copy and for the host, which is far slower than it: meant
    for small modules off the main path. Results are those of another processor, equal up to
    rounding; dropout inside draws from the host's generator. Once a parameter is on the host,
    torch's own choice of an optimizer's implementation is one parameter at a time, and
    optimizer-implementation may name another. Of the host's memory, what is kept there for
    backward is not counted. A forward that changes its inputs, or gives views of them or of its
    buffers, is refused: the caller would see another copy. Weights that are read from outside of
    the forward are found on the host, which a GPU refuses. The planner does not choose it by
    itself.
    Source: the device maps of Accelerate, https://huggingface.co/docs/accelerate/concept_guides/
    big_model_inference, which bring such weights to the device instead, and for inference alone.
    """

    modules: tuple[str, ...]

    name: ClassVar[str] = STRATEGY
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL})
    none_offered: ClassVar[str] = (
        "which modules are off the main path is for you to say, in a plan of your own."
    )
    not_with_shards: ClassVar[str] = _RANKS
    acts_on: ClassVar[Mapping[Category, float]] = dict.fromkeys(Category, 1.0)
    never_faster: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "ddp": _RANKS,
        "fsdp2": _RANKS,
        "four-bit-base": _ALSO_MOVES,
        "pure-bf16": _OF_ONE_DEVICE,
        "eight-bit-optimizer": _OF_ONE_DEVICE,
        "optimizer-offload": "it would move the states that are on the host already",
        "optimizer-in-backward": _OF_ONE_DEVICE,
        "linear-cross-entropy": "it reads the weight of a layer from outside of its forward",
        "tiling": "it reads weights from outside of the forward that they belong to",
        "frozen-offload": _ALSO_MOVES,
        "batchnorm-replay": (
            "replay stops forward passes half way, inside modules that compute as a whole"
        ),
        "cached-gradients": "it runs parts of the model apart from its forward",
        "fp16": SCALED,
    }

    def __post_init__(self) -> None:
        if not self.modules:
            msg = "modules must name at least one module"
            raise ValueError(msg)

    @classmethod
    def own_facts(cls, session: Session) -> HostFacts:
        """Look for what modules share, and for those that are never called."""
        return host_facts(session.model, session.optimizer)

    @property
    def needs_card(self) -> bool:
        """Return that it does."""
        return True

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer nothing: which modules are off the main path is for the user to say."""
        del facts
        yield from ()

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse the host where it is the device, and modules that others share weights with."""
        if facts.device_type == CPU:
            return "on the cpu the host is the device, so nothing would be saved."
        try:
            names = expand_names(self.modules, facts.module_names)
        except ValueError as error:
            return f"{error}."
        return facts.of(HostFacts).obstacle(names)

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Masks that are drawn on the host are others than those of the device."""
        draws = facts.has_dropout or bool(facts.draws_random)
        return Numerics.SAME_IN_LAW if draws else Numerics.EXACT

    def stays(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        """Return what the modules hold, so that it never needs room on the device."""
        return tensors_of(each for _, each in self._named(model))

    def apply(self, session: Session) -> Undo:
        """Move what the modules hold, and have each of them compute on the host."""
        shared = shared_facts(session)
        if reason := self.obstacle(shared) or self.own_facts(session).obstacle(
            expand_names(self.modules, shared.module_names)
        ):
            raise StrategyError(self.name, reason)
        chosen = self._named(session.model)
        device = _device_of(session)
        crossing = Crossing(device, session.spill)
        with ExitStack() as undos:
            tensors = tensors_of(each for _, each in chosen)
            undos.callback(move_to_host(session, tensors, device))
            for name, module in chosen:
                forward = HostForward(name, module, crossing)
                undos.callback(replace_forward(module, forward))
            return undos.pop_all().close

    def _named(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """Return the modules by name, each once; none where one is not there."""
        known = tuple(name for name, _ in model.named_modules(remove_duplicate=False) if name)
        try:
            names = expand_names(self.modules, known)
        except ValueError:
            return []
        found = {id(each): (name, each) for name in names for each in [model.get_submodule(name)]}
        return [*found.values()]


def _device_of(session: Session) -> torch.device:
    """Return the device that most of the model lies on."""
    for tensor in (*session.model.parameters(), *session.model.buffers()):
        if tensor.device.type == session.device_type:
            return tensor.device
    return torch.device(session.device_type)
