"""Scans training samples for their influence on test samples, or on themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.devices.catalogue import current_device_name
from memfit.devices.spec import CPU
from memfit.errors import JobError, UsageError
from memfit.job import Job, Total
from memfit.prediction.budget import read_budget

from .checkpoints import Checkpoint, checksum_of
from .choice import Choice, chosen_parameters, made_ready
from .gradients import GradientReader, SampleLoss
from .products import DEFAULT_LIMIT_BYTES
from .projection import Projection
from .proof import look_at, prove
from .results import Progress, ScanPrediction, Scores, SelfInfluence
from .samples import Samples
from .state import ScanState, opened_state
from .step import Chunks, Side, Sides, check_proof, chunks_within, predict_proof, predict_step
from .sums import Extremes, PairSums
from .walk import OwnSink, PairSink, Walk

EXACT, PROJECTED = "exact", "projected"
_USUAL_CHUNK = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """Compute the influence of training samples: TracInCP, exactly and in bounded memory.

    ``score(z, z') = sum over checkpoints t of eta_t <grad l(z, theta_t), grad l(z', theta_t)>``.
    The inner products come from per-sample inputs and output gradients; the gradients are not
    made. It is proved on a few samples before it is used; what is not followed is made by a
    backward pass for each sample, which is as exact and slower, and the result names it.

    While a scan runs, the model is in evaluation mode; dropout would make a loss of its own each
    time. It is left with the weights of the last checkpoint.

    Source: Pruthi et al. 2020 (arXiv 2002.08484), section 3.

    Limits: losses that compare samples of a batch, and batch normalisation in training, have no
    per-sample gradients and are refused. Weight decay and other terms without samples have no part
    in the scores.
    """

    model: nn.Module
    loss: SampleLoss | Job
    """``(model, batch) -> losses (B,)``; or a job, whose loss of each sample alone is taken."""
    train: Any
    """Samples, as ``Samples.of`` takes them."""
    test: Any = None
    """None compares the training samples with themselves alone."""
    test_loss: SampleLoss | Job | None = None
    """None takes the same loss for test samples."""
    checkpoints: Sequence[Checkpoint] = ()
    """Loaded one after the other; without any the model is taken as it is, at a rate of 1."""
    parameters: Choice = None
    """None for all; a number for the last so many layers; or names of parameters and modules."""
    method: str = EXACT
    """``exact``; or ``projected``, an approximation by random matrices on both sides."""
    dimension: int = 16
    """Rows and columns that a projected gradient keeps of each parameter."""
    seed: int = 0
    """Of the projection."""
    unproved: Sequence[str] = ()
    """Parameters whose gradient is too large to be made even once, which the proof leaves out."""
    top_k: int | None = None
    """Keep so many highest and lowest scores of each test sample instead of all scores."""
    budget: str | int | None = None
    """How many bytes a step may take, weights included; it chooses the chunks."""
    train_chunk: int | None = None
    """Training samples read at a time; None leaves it to the budget, or takes 128."""
    test_chunk: int | None = None
    """Test samples held at a time; as above."""
    folder: str | Path | None = None
    """Where a scan keeps scores and its progress; it goes on from there, with equal bits."""
    listener: Callable[[Progress], None] | None = None
    """Told after each step."""

    def __post_init__(self) -> None:
        if self.method not in (EXACT, PROJECTED):
            msg = f"method is {EXACT!r} or {PROJECTED!r}, not {self.method!r}."
            raise UsageError(msg)
        for name in ("dimension", "top_k", "train_chunk", "test_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")

    def predict(self, device: str = "cpu") -> ScanPrediction:
        """Predict the peak and the time of a scan. A few samples are proved; no step is run.

        Weights, what is held and the proof are included; the samples themselves are not, where they
        lie on the host beside a device.

        Args:
            device: a name from ``memfit devices``.

        Raises:
            RecordingError: if the step cannot be recorded.
            CoupledSamplesError: if samples have no gradients of their own.
            NoPlanFitsError: if not even single samples fit into the budget.
        """
        with self._opened() as begun:
            walk = begun.walk_on(device)
            return ScanPrediction(
                step=predict_step(begun.sides, walk.chunks, device),
                proof=predict_proof(begun.sides, device),
                train_chunk=walk.chunks.train,
                test_chunk=walk.chunks.test,
                num_steps=walk.num_steps_each * len(walk.checkpoints),
            )

    def scores(self) -> Scores:
        """Compute the scores of all pairs of test and training samples.

        Raises:
            CoupledSamplesError: if samples have no gradients of their own.
            JobError: if the loss gives no loss for each sample, or one that is no number.
            DataError: if a checkpoint or the folder cannot be used.
            OtherScanError: if the folder holds another scan.
            NoPlanFitsError: if not even single samples fit into the budget.
            UsageError: if there are no test samples.
        """
        if self.test is None:
            msg = "There are no test samples: give test=..., or ask for self_influence()."
            raise UsageError(msg)
        with self._opened() as begun, ExitStack() as stack:
            state = begun.state()
            last = len(begun.walk.checkpoints) - 1
            sums = None
            if self.top_k is None or last:
                folder = begun.walk.folder
                if folder is None and self.top_k is not None:
                    made = tempfile.TemporaryDirectory(prefix="memfit-influence-")
                    folder = Path(stack.enter_context(made))
                sums = PairSums(begun.num_test, begun.num_train, folder)
            extremes = None
            if self.top_k is not None:
                number = min(self.top_k, begun.num_train)
                extremes = Extremes.kept_in(state.arrays, begun.num_test, number)
            begun.walk.go_on(state, PairSink(sums=sums, extremes=extremes, last=last))
            return Scores(
                **begun.found(),
                num_test=begun.num_test,
                scores=None if sums is None or extremes is not None else sums.total(last),
                helpful=None if extremes is None else extremes.ranked("helpful"),
                harmful=None if extremes is None else extremes.ranked("harmful"),
            )

    def self_influence(self) -> SelfInfluence:
        """Compute the score of each training sample with itself.

        Raises:
            CoupledSamplesError: if samples have no gradients of their own.
            JobError: if the loss gives no loss for each sample, or one that is no number.
            DataError: if a checkpoint or the folder cannot be used.
            OtherScanError: if the folder holds another scan.
            NoPlanFitsError: if not even single samples fit into the budget.
            UsageError: if there are test samples.
        """
        if self.test is not None:
            msg = "Self-influence compares training samples with themselves: leave test out."
            raise UsageError(msg)
        with self._opened() as begun:
            state = begun.state()
            own = state.arrays.setdefault("own", np.zeros(begun.num_train))
            begun.walk.go_on(state, OwnSink(scores=own))
            return SelfInfluence(**begun.found(), scores=own)

    @contextmanager
    def _opened(self) -> Iterator[_Begun]:
        """Load the first checkpoint, prove, and choose the chunks."""
        given = Checkpoint(name="the model as it is", load=self.model.state_dict)
        checkpoints = list(self.checkpoints)
        if checkpoints:
            checkpoints[0].load_into(self.model)
        chosen = chosen_parameters(self.model, self.parameters)
        budget_bytes = read_budget(self.budget)
        with made_ready(self.model, chosen):
            sides = self._sides(chosen, budget_bytes)
            if budget_bytes is not None:
                for side in sides.each():
                    look_at(side.reader, side.samples)
                check_proof(sides, budget_bytes, _device_of(self.model))
            error = max(prove(side.reader, side.samples) for side in sides.each())
            begun = _Begun(
                scan=self,
                sides=sides,
                proof_error=error,
                budget_bytes=budget_bytes,
                checkpoints=checkpoints or [given],
            )
            yield begun

    def _sides(self, chosen: dict[str, nn.Parameter], budget_bytes: int | None) -> Sides:
        projection = None
        if self.method == PROJECTED:
            projection = Projection(dimension=self.dimension, seed=self.seed)
        limit_bytes = DEFAULT_LIMIT_BYTES
        if budget_bytes is not None:
            limit_bytes = min(limit_bytes, max(1, budget_bytes // 16))
        reader = GradientReader(
            model=self.model,
            loss=_losses_of(self.loss),
            parameters=chosen,
            unproved=frozenset(self.unproved),
            limit_bytes=limit_bytes,
        )
        train = Side(reader=reader, samples=_samples("train", self.train), projection=projection)
        if self.test is None:
            return Sides(train=train, test=None)
        if self.test_loss is not None:
            reader = reader.of_loss(_losses_of(self.test_loss))
        test = Side(reader=reader, samples=_samples("test", self.test), projection=projection)
        return Sides(train=train, test=test)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Begun:
    """A scan whose first checkpoint is loaded and proved."""

    scan: Scan
    sides: Sides
    proof_error: float
    budget_bytes: int | None
    checkpoints: Sequence[Checkpoint]

    @property
    def num_train(self) -> int:
        return self.sides.train.samples.count

    @property
    def num_test(self) -> int:
        return 0 if self.sides.test is None else self.sides.test.samples.count

    def chunks_on(self, device: str) -> Chunks:
        """Return how many samples a step takes: as they are set, or what the budget allows."""
        scan = self.scan
        chunks = Chunks(
            train=min(self.num_train, scan.train_chunk or _USUAL_CHUNK),
            test=min(self.num_test, scan.test_chunk or _USUAL_CHUNK),
        )
        if self.budget_bytes is None:
            return chunks
        return chunks_within(self.sides, chunks, self.budget_bytes, device)

    @cached_property
    def walk(self) -> Walk:
        """Return the steps of the scan."""
        return self.walk_on(_device_of(self.scan.model))

    def walk_on(self, device: str) -> Walk:
        """Return the steps of the scan with the chunks that a device allows."""
        return Walk(
            sides=self.sides,
            checkpoints=self.checkpoints,
            chunks=self.chunks_on(device),
            folder=None if self.scan.folder is None else Path(self.scan.folder),
            listener=self.scan.listener,
        )

    def state(self) -> ScanState:
        """Return what the folder has of this scan, or a new state."""
        few = [side.samples.batch(side.samples.spread(3)) for side in self.sides.each()]
        tensors = [each for each in tree_leaves(few) if isinstance(each, Tensor)]
        chunks = self.walk.chunks
        facts = {
            "num_train": self.num_train,
            "num_test": self.num_test,
            "train_chunk": chunks.train,
            "test_chunk": chunks.test,
            "limit_bytes": self.sides.train.reader.limit_bytes,
            "parameters": list(self.sides.train.reader.parameters),
            "checkpoints": [[each.name, each.learning_rate] for each in self.checkpoints],
            "method": self.scan.method,
            "dimension": self.scan.dimension,
            "seed": self.scan.seed,
            "top_k": self.scan.top_k,
            "samples": checksum_of(tensors),
        }
        return opened_state(self.walk.folder, facts)

    def found(self) -> dict[str, Any]:
        """Return how scores were found, as results have it."""
        unread: dict[str, str] = {}
        for side in self.sides.each():
            unread |= side.reader.unread
        return {
            "num_train": self.num_train,
            "checkpoints": [each.name for each in self.checkpoints],
            "learning_rates": [each.learning_rate for each in self.checkpoints],
            "parameters": list(self.sides.train.reader.parameters),
            "unread": unread,
            "unproved": [each for each in self.scan.unproved if each not in unread],
            "method": self.scan.method,
            "proof_error": self.proof_error,
            "train_chunk": self.walk.chunks.train,
            "test_chunk": self.walk.chunks.test,
        }


def scores(
    model: nn.Module, loss: SampleLoss | Job, train: Any, test: Any, **settings: Any
) -> Scores:
    """Compute the influence of training samples on test samples; see ``Scan`` for the settings."""
    return Scan(model=model, loss=loss, train=train, test=test, **settings).scores()


def self_influence(
    model: nn.Module, loss: SampleLoss | Job, samples: Any, **settings: Any
) -> SelfInfluence:
    """Compute the influence of samples on themselves; see ``Scan`` for the settings."""
    return Scan(model=model, loss=loss, train=samples, **settings).self_influence()


def _samples(name: str, source: Any) -> Samples:
    """Take samples, of which there has to be one.

    Raises:
        JobError: if there is none.
    """
    samples = Samples.of(source)
    if not samples.count:
        msg = f"There are no {name} samples; needed is at least one."
        raise JobError(msg)
    return samples


def _device_of(model: nn.Module) -> str:
    """Name the device that a model lies on, as the catalogue does."""
    kind = next(model.parameters()).device.type
    return CPU if kind == CPU else current_device_name()


def _losses_of(loss: SampleLoss | Job) -> SampleLoss:
    """Return a per-sample loss; of a job, its own loss of each sample as a batch of one."""
    return _JobLosses(loss) if isinstance(loss, Job) else loss


class _JobLosses:
    """A job's loss on every sample at once, each as if it were alone in its batch."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return losses (B,).

        Raises:
            JobError: if the loss cannot be computed so.
        """
        leaves = [each for each in tree_leaves(batch) if isinstance(each, Tensor)]
        if len({len(each) if each.dim() else 0 for each in leaves}) != 1:
            msg = (
                "The tensors of the job's batch do not have the samples in their first dimensions. "
                "Give a loss for each sample instead: (model, batch) -> losses (B,)."
            )
            raise JobError(msg)

        def alone(sample: Any) -> Tensor:
            value = self._job.loss(model, tree_map_only(Tensor, lambda each: each[None], sample))
            return value.sum if isinstance(value, Total) else value

        try:
            losses: Tensor = torch.func.vmap(alone)(batch)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            msg = (
                f"The job's loss cannot be computed for each sample at once ({reason:.200}). Give "
                "a loss for each sample instead: (model, batch) -> losses (B,)."
            )
            raise JobError(msg) from None
        return losses
