"""Linear cross-entropy: a large output layer and its loss are computed in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from memfit.session.gathered import KeptGathered, has_shards
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.strategies.linear_cross_entropy.deferred_logits import deferred_logits
from memfit.strategies.linear_cross_entropy.noted_logits import noted_heads

_FEWEST_ROWS = 128


@dataclass(frozen=True, slots=True)
class LargestHead:
    """The most that a linear layer of a step scores for nothing but a cross-entropy."""

    num_classes: int | None = None
    """0 without such a layer, None where no step has been seen yet."""
    num_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy(Strategy):
    """Never store the logits of an output layer whose loss is a cross-entropy.

    The pair is found in the unchanged loss and model, also through ``.float()``, views, slices that
    shift tokens, and transpositions. Logits of rows x classes exist for one chunk of rows at a
    time; gradients of the layer's input and weight are made in the same pass.

    Limits: the layer must have at least 1024 outputs and more than four times as many as inputs;
    whatever else uses the logits (a metric, a scaling, a soft target) makes them as before, which
    is correct and saves nothing. The loss can be backpropagated once, and not differentiated twice.
    Source: Hsu et al. 2024, https://arxiv.org/abs/2410.10989, section 3.2, on making the gradients
    in the forward pass; the derivation is in memfit.losses.linear_cross_entropy.
    """

    num_rows: int

    name: ClassVar[str] = "linear-cross-entropy"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.FORWARD})
    goes_with_shards: ClassVar[bool] = True
    costs_little: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_at_least(1, "num_rows")

    @classmethod
    @contextmanager
    def probe(cls) -> Iterator[Callable[[], LargestHead]]:
        """Note the output layers of a step."""
        with noted_heads() as heads:
            yield lambda: LargestHead(
                max((head.num_classes for head in heads), default=0),
                max((head.num_rows for head in heads), default=0),
            )

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer a sixteenth of the rows: products stay large, and little is left to be saved."""
        num_rows = facts.of(LargestHead).num_rows
        if num_rows > _FEWEST_ROWS:
            yield cls(num_rows=max(_FEWEST_ROWS, num_rows // 16))

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse steps without such a pair."""
        if facts.of(LargestHead).num_classes != 0:
            return None
        return (
            "no output layer with many classes goes straight into a cross-entropy, so there are "
            "no logits to do without."
        )

    def apply(self, session: Session) -> Undo:
        """Put logits off around forward and loss."""
        gathered = KeptGathered(session.model) if has_shards(session.model) else None
        with ExitStack() as undos:
            if gathered is not None:
                undos.callback(gathered.undo)
            undos.callback(session.wrap_forward(partial(deferred_logits, self.num_rows, gathered)))
            return undos.pop_all().close
