"""Says what a rank would take under ZeRO: the plain step as recorded, with ZeRO's own arithmetic.

No engine can be recorded without its ranks, so that model states are computed from what DeepSpeed
allocates, and what the step itself takes is recorded on one rank at the size of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from memfit.devices.spec import CPU
from memfit.errors import RecordingError
from memfit.figures import Certainty, Interval, Term, Timeline
from memfit.integrations.deepspeed.choice import BF16, FP16, NONE, ZeroChoice
from memfit.job import Job
from memfit.prediction.predict import predict
from memfit.session.batches import find_layout
from memfit.session.borrowing import borrowed_to_record
from memfit.session.session import open_session
from memfit.trace.events import Category, Phase
from memfit.virtual.tensors import virtual_tensors

_MASTER_BYTES = 4
_ZERO = "deepspeed/runtime/zero, read at 0.19.8"
_MOST_COPIES = 4
"""An update of one tensor after another has no more of the largest one than this."""
_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank takes on its device while it trains under an engine."""

    peak_bytes: int
    """Where parameters are let go of when they have been used; the engine may keep them longer."""
    interval: Interval
    """From what has to be there at once, to all of it with a copy of what is exchanged."""
    terms: Sequence[Term]
    """What ``peak_bytes`` is made of."""
    host_bytes: int
    """What waits on the host, where the choice has it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The parameters of a model, in elements."""

    trained: int
    frozen: int
    largest: int
    small: int
    """In parameters that stage 3 leaves whole."""
    state_copies: float
    """The optimizer's states, in copies of the parameters."""


def predict_rank(
    job: Job, choice: ZeroChoice, *, num_ranks: int, device: str = "cpu"
) -> RankMemory:
    """Predict what a rank takes under an engine, without one.

    This is arithmetic, unlike other predictions of memfit: certainty ``guess``, with an interval.

    Args:
        job: its batch is that of one rank.
        choice: of stage, offload and sizes.
        num_ranks: how many train together.
        device: a name from ``memfit devices``.

    Raises:
        RecordingError: if the step cannot be recorded.
    """
    piece = replace(job, batch_size=choice.micro_batch_size or job.batch_size)
    timeline = predict(piece, device).timeline
    if timeline is None:
        reason = "the step has no timeline, so what it takes beside the weights is not known"
        raise RecordingError(reason, "Predict it on another device.")
    weights = _weights_of(piece, choice, timeline)
    shares = _Shares(weights=weights, choice=choice, num_ranks=num_ranks)
    states = shares.states()
    host = shares.on_host()
    if device == CPU:  # the host's memory is the device's
        states, host = [*states, *host], []
    ways = (
        shares.computing(timeline),
        shares.backward(timeline),
        shares.reduction(),
        shares.update(timeline),
    )
    worst = max(ways, key=_total)
    peak_bytes = _total([*states, *worst])
    largest_bytes = weights.largest * shares.element
    passing = largest_bytes + sum(
        t.num_bytes for t in worst if t.name in {"gathered parameters", "reduce bucket"}
    )
    room = shares.whole_bytes * (2 if choice.shards_weights else 1) + shares.shard_bytes
    room += min(shares.bucket(), shares.whole_bytes)  # a backend's own copy of it
    return RankMemory(
        peak_bytes=peak_bytes,
        interval=Interval(low_bytes=peak_bytes - passing, high_bytes=peak_bytes + room),
        terms=tuple(t for t in (*states, *worst) if t.num_bytes),
        host_bytes=_total(host),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """What a rank has of each kind, at each part of a step; sources are of DeepSpeed 0.19.8."""

    weights: _Weights
    choice: ZeroChoice
    num_ranks: int

    @property
    def element(self) -> int:
        """Return the bytes of one element of what is computed with."""
        return 2 if self.choice.precision in {BF16, FP16} else 4

    @property
    def shard(self) -> int:
        """Return the elements that this rank updates."""
        return -(-self.weights.trained // self.num_ranks) if self.choice.stage else 0

    @property
    def shard_bytes(self) -> int:
        """Return the bytes of one copy of them, as the update has them."""
        return self.shard * _MASTER_BYTES

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of all parameters, as they are computed with."""
        return (self.weights.trained + self.weights.frozen) * self.element

    @property
    def offloads(self) -> bool:
        """Return whether the update is on the host."""
        return self.choice.offload_optimizer != NONE

    def states(self) -> list[Term]:
        """Return what lives on the device from step to step."""
        choice, weights, held = self.choice, self.weights, self.whole_bytes
        if choice.shards_weights:
            small, is_away = weights.small * self.element, choice.offload_parameters != NONE
            held = small + (0 if is_away else held // self.num_ranks)
        updated = self.shard_bytes or weights.trained * self.element
        on_device = not self.offloads
        kept = self.shard * self.element * choice.shards_weights
        return [
            _term("weights", held, "bit16_groups_flat, or this rank's shard and what stays whole"),
            _term("fp32 weights", self.shard_bytes * on_device, "weights_partition"),
            _term("states", int(updated * weights.state_copies) * on_device, "of what it updates"),
            _term("gradient shard", kept * on_device, "grad_partitions_flat_buffer"),
            _term("reduce bucket", self.bucket() * choice.shards_weights, "allocated whole"),
        ]

    def on_host(self) -> list[Term]:
        """Return what lives on the host."""
        states = int(self.shard_bytes * self.weights.state_copies)
        terms = []
        if self.choice.offload_parameters != NONE:
            shards = self.whole_bytes // self.num_ranks
            terms.append(_term("weights on the host", shards, "param_groups_fp16_flat_cpu_memory"))
        if self.offloads:
            buffers = 2 * self.weights.largest * self.element + self.shard * self.element
            terms += [
                _term("fp32 weights on the host", self.shard_bytes, "weights_partition"),
                _term("states on the host", states, "of what it updates"),
                _term("gradients on the host", 2 * self.shard_bytes, "accumulated, and in fp32"),
                _term("copies on the host", buffers, "temp_grad_buffer, param_buffer_of_bit16"),
            ]
        return terms

    def computing(self, timeline: Timeline) -> list[Term]:
        """Return what a forward takes besides: gradients of former passes are with their owners."""
        end = _begin_of(timeline, Phase.BACKWARD)
        most = max(_beside_states(timeline)[: end + 1], default=0)
        return [_term("step", most, "recorded: forward", Certainty.TABLE), self._gathered()]

    def backward(self, timeline: Timeline) -> list[Term]:
        """Return what backward takes besides, where gradients are and go to their owners."""
        begin, end = _begin_of(timeline, Phase.BACKWARD), _begin_of(timeline, Phase.OPTIMIZER)
        beside = _beside_states(timeline)[begin:end]
        if self.choice.stage < 2:
            made = timeline.by_category.get(Category.GRADIENTS.value, [0] * end)[begin:end]
            both = [one + other for one, other in zip(beside, made, strict=False)]
            return [_term("step", max(both, default=0), "recorded: backward", Certainty.TABLE)]
        shard = 0 if self.choice.shards_weights or self.offloads else self.shard_bytes
        largest = self.weights.largest * self.element
        # Nothing of them is there before the first gradient is.
        made = timeline.by_category.get(Category.GRADIENTS.value, [0] * end)[begin:end]
        with_some = [one for one, gradients in zip(beside, made, strict=False) if gradients]
        before, behind = max(beside, default=0), max(with_some, default=0)
        is_behind = behind + shard + largest > before
        return [
            _term("step", behind if is_behind else before, "recorded: backward", Certainty.TABLE),
            _term("gradients", shard * is_behind, "averaged_gradients"),
            _term("gradient of one tensor", largest * is_behind, "not yet reduced"),
            _term("reduce bucket", self.bucket() * (self.choice.stage == 2), "allocated whole"),
            self._gathered(),
        ]

    def update(self, timeline: Timeline) -> list[Term]:
        """Return what the update takes besides, of one flat tensor for each group of parameters."""
        begin = _begin_of(timeline, Phase.OPTIMIZER)
        temporaries = max(_beside_states(timeline)[begin:], default=0)
        if not self.shard:
            whole = self.weights.trained * self.element
            return [_term("gradients", whole, "whole"), _term("update", temporaries, "recorded")]
        copies = temporaries / max(1, self.weights.largest * self.element)
        if copies > _MOST_COPIES:  # all tensors were updated at once
            copies = temporaries / max(1, self.weights.trained * self.element)
        bucket = self.bucket() if self.offloads and not self.choice.shards_weights else 0
        flat = 0 if self.offloads else self.shard_bytes
        return [
            _term("flat gradients", flat, "single_grad_partition"),
            _term("update", int(copies * self.shard_bytes), "temporaries, recorded for one tensor"),
            _term("reduce bucket", bucket, "allocated whole"),
        ]

    def reduction(self) -> list[Term]:
        """Return what stage 1 takes before its update, where whole gradients are exchanged."""
        if self.choice.stage != 1:
            return []
        whole = self.weights.trained * self.element
        return [
            _term("gradients", whole, "whole until they are flattened"),
            _term("flat gradients", 0 if self.offloads else self.shard_bytes, "of the shard"),
            _term("reduce bucket", self.bucket(), "allocated whole"),
        ]

    def _gathered(self) -> Term:
        live = min(self.weights.trained + self.weights.frozen, self.choice.max_live_elements)
        num_bytes = max(0, live - self.weights.small) * self.element * self.choice.shards_weights
        return _term("gathered parameters", num_bytes, "up to stage3_max_live_parameters")

    def bucket(self) -> int:
        """Return the bytes of one bucket of gradients."""
        copies = 0 if not self.choice.contiguous_gradients or not self.choice.stage else 1
        return copies * self.choice.reduce_bucket_elements * self.element


def _begin_of(timeline: Timeline, phase: Phase) -> int:
    return next((n for n, name in timeline.phases if name == phase), len(timeline.allocated_bytes))


def _beside_states(timeline: Timeline) -> list[int]:
    parts = [timeline.by_category.get(each.value, ()) for each in _STATES]
    return [
        total - sum(part[n] for part in parts if part)
        for n, total in enumerate(timeline.allocated_bytes)
    ]


def _weights_of(job: Job, choice: ZeroChoice, timeline: Timeline) -> _Weights:
    """Count a job's parameters on fake tensors."""
    with virtual_tensors() as mode, borrowed_to_record(job, mode) as borrowed:
        session = open_session(borrowed, "cpu", find_layout(job), _not_run)
        parameters = [(p.numel(), p.requires_grad, p.nbytes) for p in session.model.parameters()]
    trained = sum(n for n, is_trained, _ in parameters if is_trained)
    trained_bytes = sum(size for _, is_trained, size in parameters if is_trained)
    states = timeline.by_category.get(Category.OPTIMIZER_STATE.value, (0,))[0]
    return _Weights(
        trained=trained,
        frozen=sum(n for n, is_trained, _ in parameters if not is_trained),
        largest=max((n for n, is_trained, _ in parameters if is_trained), default=0),
        small=sum(n for n, _, _ in parameters if n < choice.persistence_elements),
        state_copies=states / max(1, trained_bytes),
    )


def _not_run(*_: object) -> torch.Tensor:
    raise AssertionError("nothing is run here")


def _term(name: str, num_bytes: int, source: str, certainty: Certainty = Certainty.GUESS) -> Term:
    return Term(name=name, num_bytes=num_bytes, certainty=certainty, source=f"{source} ({_ZERO})")


def _total(terms: Sequence[Term]) -> int:
    return sum(term.num_bytes for term in terms)
