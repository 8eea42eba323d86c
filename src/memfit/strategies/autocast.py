"""What bf16 and fp16 share: autocast around forward and loss, and modules that it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

from memfit.errors import StrategyError
from memfit.session.block_names import expand_names, first_few
from memfit.session.forwards import replace_forward
from memfit.session.session import Session
from memfit.strategies.base import Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts, own_autocast_obstacle, shared_facts

_SHORT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Containers:
    """Modules without a forward, which hold others and are never called."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AbstractAutocast(Strategy):
    """Run forward and loss under autocast, but for the modules in ``keep``.

    Kept modules compute in the types of their parameters: their floating-point inputs are brought
    to float32, and what they give flows on as it is. Names are written as those of blocks.
    """

    keep: tuple[str, ...] = ()

    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL, Seam.FORWARD})
    dtype: ClassVar[torch.dtype]

    def label(self) -> str:
        """Name what is kept: ``bf16(keep=head)``."""
        return f"{self.name}(keep={' '.join(self.keep)})" if self.keep else self.name

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse a loss that has an autocast of its own, and modules that cannot be kept."""
        if reason := own_autocast_obstacle(facts):
            return reason
        try:
            names = expand_names(self.keep, facts.module_names)
        except ValueError as error:
            return f"{error}."
        containers = [name for name in names if name in facts.of(Containers).names]
        if containers:
            return (
                f"{first_few(containers)} only holds other modules and is never called, so nothing "
                f"would be kept. Name what it holds, such as {containers[0]}.0."
            )
        return None

    def autocast(self, session: Session) -> Undo:
        """Add the autocast context, and have kept modules step out of it."""
        kept = _Kept(session, self.name)
        with ExitStack() as undos:
            context = partial(torch.autocast, session.device_type, dtype=self.dtype)
            undos.callback(session.wrap_forward(context))
            if not self.keep:
                return undos.pop_all().close
            facts = shared_facts(session)
            if reason := self.obstacle(facts):
                raise StrategyError(self.name, reason)
            for name in expand_names(self.keep, facts.module_names):
                module = session.model.get_submodule(name)
                undos.callback(replace_forward(module, kept.forward(name, module.forward)))
            undos.callback(session.wrap_forward(kept.all_called))
            return undos.pop_all().close


def containers_of(session: Session) -> Containers:
    """Look for modules that cannot be called."""
    plain = torch.nn.Module.forward
    modules = session.model.named_modules()
    return Containers(
        tuple(name for name, module in modules if name and type(module).forward is plain)
    )


class _Kept:
    """Run modules outside of autocast, and see that each of them is called at all."""

    def __init__(self, session: Session, strategy: str) -> None:
        self._device_type = session.device_type
        self._strategy = strategy
        self._waiting: set[str] = set()
        self._is_seen = False

    def forward(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that computes outside of autocast."""
        self._waiting.add(name)
        return partial(self._run, name, forward)

    def _run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._waiting.discard(name)
        args, kwargs = tree_map_only(torch.Tensor, _as_float32, (args, kwargs))
        with torch.autocast(self._device_type, enabled=False):
            return forward(*args, **kwargs)

    @contextmanager
    def all_called(self) -> Iterator[None]:
        """Refuse a first loss that is computed without one of them.

        Raises:
            StrategyError: with the names.
        """
        yield
        if self._waiting and not self._is_seen:
            reason = (
                f"the step does not call {first_few(sorted(self._waiting))}, so nothing would be "
                "kept there: its weights are used by another module. Name that one, or leave it "
                "out of keep."
            )
            raise StrategyError(self._strategy, reason)
        self._is_seen = True


def _as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Bring a tensor that autocast has shortened back to float32."""
    return tensor.float() if tensor.dtype in _SHORT else tensor
