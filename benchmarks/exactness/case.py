"""What a case is: a job, and what its author says is true of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any, Literal

from exactness.parts import make_job
from memfit import Job

Adds = Literal["mean", "sum", "groups", "no"]
Draws = Literal["none", "per-sample", "shared"]
Leaves = Literal["same", "scratch", "different"]
Half = Literal["blind", "public"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job, and what is declared of it; ``truth.py`` computes the same without looking here."""

    name: str
    build: Callable[[], Job]
    """Make the job anew: two jobs share no state."""
    half: Half
    adds: Adds = "mean"
    """How the gradients of the pieces of a batch make up its gradient, draws held still.

    ``mean``: weighted by their shares of the samples, or by count for a ``Total``. ``sum``:
    unweighted. ``groups``: as ``mean``, while pieces of equal length keep neighbours together and
    others do not. ``no``: in neither way, or a piece fails.
    """
    draws: Draws = "none"
    """What is drawn at random in forward: nothing, for each sample, or once for the whole batch."""
    effects: bool = False
    """Whether forward and backward change anything but gradients and random states."""
    leaves: Leaves = "same"
    """What accumulation leaves in buffers and attributes, against the step in one piece.

    ``scratch``: something else, in attributes that each forward writes before anything reads them.
    """
    recompute_unsafe: bool = False
    """Whether running each block's forward twice gives other gradients or leaves another state."""
    blocks: str = ""
    """The path of the list of blocks that are recomputed; empty takes the model's children."""
    source: str = ""
    """The public repository and file whose practice this follows."""

    @property
    def coupled(self) -> bool:
        """Return whether the usual accumulation of this job computes another gradient."""
        return self.adds in ("no", "groups") or self.draws == "shared"

    @property
    def best_true_class(self) -> str:
        """Name the strongest class that micro-batching in four equal pieces may be called."""
        if self.adds in ("no", "sum") or self.draws == "shared" or self.leaves == "different":
            return "different"
        return "exact" if self.draws == "none" else "same-in-law"

    @property
    def description(self) -> str:
        """Return the builder's docstring."""
        return (self.build.__doc__ or "").strip()


@dataclass(slots=True)
class Theme:
    """Collects the cases of one file."""

    half: Half
    cases: list[Case] = field(default_factory=list)

    def case(self, **declared: Any) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
        """Make a case of a function that builds a job; it takes the function's name."""
        declared["effects"] = declared.get("effects") or declared.get("leaves", "same") != "same"

        def collect(build: Callable[[], Job]) -> Callable[[], Job]:
            self.cases.append(Case(name=build.__name__, build=build, half=self.half, **declared))
            return build

        return collect

    def model(
        self,
        batch: Callable[[int], Any],
        loss: Callable[..., Any],
        batch_size: int = 16,
        **declared: Any,
    ) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """Make a case of a function that builds a model; what it declares is that of ``case``."""

        def collect(function: Callable[[], Any]) -> Callable[[], Any]:
            @wraps(function)
            def build() -> Job:
                return make_job(function, batch, loss, batch_size)

            self.case(**declared)(build)
            return function

        return collect

    def loss(
        self,
        model: Callable[[], Any],
        batch: Callable[[int], Any],
        batch_size: int = 16,
        **declared: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make a case of a loss function; what it declares is that of ``case``.

        A function of more than the model and the batch is given the parts of the batch.
        """

        def collect(function: Callable[..., Any]) -> Callable[..., Any]:
            def parted(model: Any, parts: tuple[Any, ...]) -> Any:
                return function(model, *parts)

            loss = parted if len(signature(function).parameters) > 2 else function

            @wraps(function)
            def build() -> Job:
                return make_job(model, batch, loss, batch_size)

            self.case(**declared)(build)
            return function

        return collect
