"""Batch-norm replay: exact micro-batching for models whose batch normalisation couples samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.devices.spec import CPU
from memfit.session.carried_effects import CarriedEffects
from memfit.session.micro_batches import GradientSum
from memfit.session.session import GradientPass, PhaseListener, Session
from memfit.strategies.base import CUTS_BATCH, AbstractSplitting, Numerics, Seam, Undo
from memfit.strategies.batchnorm_replay.normalisation import (
    LayerReachedError,
    NormalisationCalls,
    PartialStatistics,
    Statistics,
)
from memfit.strategies.facts import JobFacts, known_separation
from memfit.trace.abridgement import few_of
from memfit.trace.events import Phase
from memfit.trace.repetition import FEWEST_PIECES


@dataclass(frozen=True, kw_only=True)
class BatchNormReplay(AbstractSplitting):
    """Run micro-batches with the batch normalisation statistics of the whole batch.

    One pass per normalisation call finds its mean and variance over the whole batch. The main
    pass then takes them as inputs, so that samples no longer depend on each other; its gradients
    with respect to the statistics are carried back in one more pass per call, last call first.
    Each pass runs only as far as its call. Running statistics are updated once. Each
    micro-batch's random draws are replayed, so its dropout masks are the same in all passes; draws
    from other generators than torch's global ones are an error. Whatever else the forward changes
    happens once per step, as under micro-batching.

    Limits: about one forward and one backward more per normalisation call, so it suits models
    with few of them. Dropout masks are drawn per micro-batch: same in law as the whole batch.
    Source: the chain rule through mean and variance, written out in ``normalisation``; the same
    two-pass idea for contrastive losses is GradCache, https://arxiv.org/abs/2101.06983.
    """

    name: ClassVar[str] = "batchnorm-replay"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.WINDOW})
    not_with_shards: ClassVar[str] = (
        "it stops forwards half way, and all ranks have to finish a pass that exchanges shards"
    )
    never_faster: ClassVar[bool] = True
    takes_statistics_as_given: ClassVar[bool] = True
    fewest_pieces: ClassVar[int] = FEWEST_PIECES + 1
    """Statistics of the second piece are the first to be merged with others."""
    excludes: ClassVar[Mapping[str, str]] = {
        "micro-batching": CUTS_BATCH,
        "activation-checkpointing": (
            "replay stops forward passes half way, inside blocks that checkpointing runs as a whole"
        ),
    }

    def unsuited(self, facts: JobFacts) -> str | None:
        """Refuse models without batch normalisation, where micro-batching does it in one pass."""
        if facts.batch_norms:
            return None
        return "the model has no batch normalisation in training; micro-batching does the same."

    def least_slowdown(self, facts: JobFacts) -> float:
        """Count passes: one forward, and one forward and backward, for every call, half of each."""
        return 1 + len(facts.batch_norms) * _SHARE_OF_A_STEP

    def apply(self, session: Session) -> Undo:
        """Put the replaying gradient pass in place of the plain one."""
        found = self.separability(known_separation(session))
        carried = CarriedEffects(
            session, self.name, overwritten=found.overwritten, repeats_draws=True
        )
        replaying = _ReplayPass(self.micro_batch_size, session.gradient_pass, carried)
        return session.replace(gradient_pass=replaying)


_SHARE_OF_A_STEP = 0.5
"""What a normalisation call adds, as a share of the step. A forward is about a third of a step, so
half of one and half of a step are two thirds; layers do not all cost the same."""


class _ReplayPass:
    """Compute the gradients of the mean loss over a batch; see BatchNormReplay."""

    def __init__(
        self, micro_batch_size: int, whole_batch_pass: GradientPass, carried: CarriedEffects
    ) -> None:
        self._micro_batch_size = micro_batch_size
        self._carried = carried
        self._whole_batch_pass = whole_batch_pass
        self._num_calls: int | None = None

    def __call__(self, session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
        num_samples = session.layout.num_samples(batch)
        if self._micro_batch_size >= num_samples:
            return self._whole_batch_pass(session, batch, enter_phase)
        with (
            _replayed_randomness(session.device_type) as randomness,
            NormalisationCalls(session.model) as calls,
        ):
            pieces = [
                _Piece(piece, count / num_samples, hash((randomness.seed, index)) % 2**63)
                for index, (piece, count) in enumerate(
                    session.layout.split(batch, self._micro_batch_size)
                )
            ]
            self._carried.begin_step()
            passes = _Passes(session, pieces, calls, self._carried, enter_phase)
            passes.find_statistics(self._num_calls)
            loss = passes.main_pass(randomness)
            self._carried.end_step()
        self._num_calls = len(calls.known)
        for statistics in calls.known:
            statistics.update_running()
        return loss


@dataclass(frozen=True, slots=True)
class _Piece:
    """One micro-batch, its share of the batch's samples and the seed of its random draws."""

    batch: Any
    share: float
    seed: int


class _Passes:
    """The passes over the micro-batches of one batch."""

    def __init__(
        self,
        session: Session,
        pieces: list[_Piece],
        calls: NormalisationCalls,
        carried: CarriedEffects,
        enter_phase: PhaseListener,
    ) -> None:
        self._session = session
        self._pieces = pieces
        self._calls = calls
        self._carried = carried
        self._enter_phase = enter_phase

    def find_statistics(self, num_calls: int | None) -> None:
        """Find the statistics of every normalisation call, one pass each.

        Args:
            num_calls: how many calls a forward makes; None finds out with one forward more.
        """
        known = self._calls.known
        with torch.no_grad():
            while num_calls is None or len(known) < num_calls:
                whole = self._whole_batch_statistics()
                if whole is None:
                    return
                known.append(Statistics(whole))

    def _whole_batch_statistics(self) -> PartialStatistics | None:
        """Merge the statistics of the next unknown call; None if there is no such call."""
        whole: PartialStatistics | None = None
        for piece in few_of(self._pieces):
            reached = self._run_to(len(self._calls.known), piece)
            if reached is None:
                return None
            part = PartialStatistics.of(reached)
            del reached
            whole = part if whole is None else whole.merged_with(part)
        return whole

    def main_pass(self, randomness: _Randomness) -> torch.Tensor:
        """Take all gradients, then carry those of the statistics back; return the mean loss."""
        total = GradientSum(self._session)
        for piece in few_of(self._pieces):
            self._begin(piece, stop_at=None)
            loss = self._carried.run_part(partial(self._session.loss_of, piece.batch))
            part = total.weighted(loss, piece.share)
            del loss
            self._enter_phase(Phase.BACKWARD)
            self._session.backward(part)
            self._carried.end_piece()
            total.add(part)
            del part
            randomness.look(piece.seed)
        for call in reversed(range(len(self._calls.known))):
            for piece in few_of(self._pieces):
                self._carry_back(call, piece)
        return total.finish()

    def _carry_back(self, call: int, piece: _Piece) -> None:
        """Carry the gradients of one call's statistics back through one micro-batch."""
        reached = self._run_to(call, piece)
        assert reached is not None, "every forward makes the same normalisation calls"
        if not reached.inputs.requires_grad:
            return
        self._enter_phase(Phase.BACKWARD)
        gradient = self._calls.known[call].gradient_through(reached.inputs.detach())
        reached.inputs.backward(gradient)

    def _run_to(self, call: int, piece: _Piece) -> LayerReachedError | None:
        """Run a micro-batch's forward up to a normalisation call; None if it makes fewer."""
        self._begin(piece, stop_at=call)
        try:
            self._carried.run_part(partial(self._session.loss_of, piece.batch))
        except LayerReachedError as reached:
            # The traceback would keep every activation of the unfinished forward alive.
            return reached.with_traceback(None)
        return None

    def _begin(self, piece: _Piece, stop_at: int | None) -> None:
        self._enter_phase(Phase.FORWARD)
        torch.manual_seed(piece.seed)
        self._calls.begin_forward(stop_at)


class _Randomness:
    """The seed that a step's pieces draw from, and whether any has drawn."""

    def __init__(self, seed: int, device_type: str) -> None:
        self.seed = seed
        self._is_looked_at = device_type == CPU
        self.has_drawn = not self._is_looked_at
        """On a GPU it is not looked at, as reading a state would wait for the kernels."""

    def look(self, seed: int) -> None:
        """See whether a piece has drawn since the generator was seeded, and seed it again.

        Meant for the end of a piece, when its activations are gone: a state takes memory.
        """
        if self._is_looked_at:
            left = _random_state()
            torch.default_generator.manual_seed(seed)
            self.has_drawn |= _random_state() != left


def _random_state() -> bytes:
    """Return the state of the CPU's generator; a recording sees its memory, and gets nothing."""
    state = torch.get_rng_state()
    return b"" if isinstance(state, FakeTensor) else state.numpy().tobytes()


@contextmanager
def _replayed_randomness(device_type: str) -> Iterator[_Randomness]:
    """Give a seed taken from the random state, which has moved on afterwards if any piece drew."""
    seed = hash(tuple(_random_state()))
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    randomness = _Randomness(seed, device_type)
    with torch.random.fork_rng(devices=devices):
        yield randomness
    if randomness.has_drawn:
        torch.rand(())
