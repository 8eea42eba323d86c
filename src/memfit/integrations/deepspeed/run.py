"""Steps of a job under an engine of DeepSpeed: any number of samples, each with its true weight."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from memfit.analysis.separability import Separability
from memfit.errors import (
    BatchConditionError,
    JobFunctionError,
    MemfitError,
    OtherRankError,
    StrategyError,
)
from memfit.integrations.deepspeed.choice import ZeroChoice
from memfit.integrations.deepspeed.ending import Ending
from memfit.integrations.deepspeed.pass_watch import PassWatch
from memfit.job import Total, expected_signature
from memfit.separation.batch_conditions import broken_condition
from memfit.session.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """What one step gave."""

    loss: torch.Tensor
    """The mean over the batches of all ranks, a detached scalar in fp64."""
    num_samples: int
    """Of all ranks."""
    num_passes: int
    """Of this rank."""
    gradient_norm: float | None
    """Of all gradients before they were clipped; None where the engine computes none."""
    is_applied: bool
    """False where the engine has left the update out, since gradients were not finite."""
    step_seconds: float


class EngineRun:
    """Run a job's steps under an engine. Made by ``start`` and ``fit``.

    Args:
        session: of the job; its model is the engine.
        engine: of DeepSpeed.
        choice: what the engine was made for.
        found: what is known of pieces of a batch.
        watch: of forwards and gradients.
        ending: of a step that fails.
        changes: what was changed in the configuration that was given.
    """

    def __init__(
        self,
        session: Session,
        engine: Any,
        choice: ZeroChoice,
        *,
        found: Separability,
        watch: PassWatch,
        ending: Ending,
        changes: Sequence[str] = (),
    ) -> None:
        self._session, self._choice, self._found = session, choice, found
        self._watch, self._ending = watch, ending
        self.engine = engine
        """DeepSpeed's, for what this does not offer."""
        self.changes = tuple(changes)
        """What was changed in the configuration that was given, as ``key: before -> after``."""
        self._num_samples = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> torch.nn.Module:
        """Return the job's own module, whose parameters the engine owns."""
        module: torch.nn.Module = self.engine.module
        return module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the job's own optimizer; schedulers of torch act on it."""
        return self._session.optimizer

    @property
    def num_steps(self) -> int:
        """Count the steps done so far."""
        return int(self.engine.global_steps)

    def step(self, batch: Any) -> EngineStep:
        """Run one step on all ranks: the gradients of the mean over all samples, clip, update.

        Args:
            batch: this rank's, laid out like the job's ``batch``, of any number of samples; ranks
                may have unlike numbers. Floating-point tensors keep their type, so a model in bf16
                needs them in bf16.

        Raises:
            EngineStoppedError: if it ran out of memory or failed here, or would train something
                else than PyTorch; it says what was saved.
            OtherRankError: if another rank has.
            StrategyError: if a rank has fewer samples than passes are needed; nothing was changed.
            BatchConditionError: if a mean loss cannot be weighed by samples here; as above.
        """
        with self._ending.watching():
            return self._step(batch)

    def _step(self, batch: Any) -> EngineStep:
        started, engine, session = time.perf_counter(), self.engine, self._session
        device = engine.device
        num_samples = session.layout.num_samples(batch)
        broken = broken_condition(session.layout, batch, self._found.conditions)
        wanted = -(-num_samples // (self._choice.micro_batch_size or max(1, num_samples)))
        sentence = "" if broken is None else broken.sentence
        agreed = _agree(num_samples, wanted, sentence, device)
        self._ending.note_passes()
        batch = tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)
        weights = _PieceWeights(agreed.num_samples, agreed.num_passes, device)
        for piece, num_in_piece in self._pieces(batch, agreed.num_passes):
            with self._watch.computing():
                part = weights.weighed(session.loss_of(piece), num_in_piece)
            engine.backward(part, scale_wrt_gas=False)
            del part
        loss, rest = weights.finish()
        self._watch.check_gradients(device)
        with _divided_gradients(engine, rest):
            engine.step()
        self._ending.note_done()
        self._num_samples += agreed.num_samples
        engine.global_samples = self._num_samples  # it counts by the configuration's sizes
        norm = engine.get_global_grad_norm()
        return EngineStep(
            loss=loss,
            num_samples=agreed.num_samples,
            num_passes=agreed.num_passes,
            gradient_norm=None if norm is None else float(norm),
            is_applied=engine.was_step_applied(),
            step_seconds=time.perf_counter() - started,
        )

    def _pieces(self, batch: Any, num_passes: int) -> Iterator[tuple[Any, int]]:
        """Cut a batch into so many pieces; into those of a fixed size where that is as many."""
        layout, size = self._session.layout, self._choice.micro_batch_size
        num_samples = layout.num_samples(batch)
        if num_passes == 1:
            return iter([(batch, num_samples)])
        if size is not None and -(-num_samples // size) == num_passes:
            return layout.split(batch, size)
        return layout.split_evenly(batch, num_passes)

    def save_checkpoint(self, folder: str | Path, tag: str | None = None) -> None:
        """Write DeepSpeed's own checkpoint; every rank has to."""
        state = {"memfit_num_samples": self._num_samples}
        self.engine.save_checkpoint(str(folder), tag=tag, client_state=state)

    def load_checkpoint(self, folder: str | Path, tag: str | None = None) -> None:
        """Go on from DeepSpeed's own checkpoint, an emergency's among them; every rank has to.

        Raises:
            MemfitError: if there is none.
        """
        path, state = self.engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise MemfitError(
                f"{folder} holds no checkpoint of DeepSpeed that is whole: a file `latest` names "
                "the folder of each. Give another folder, or the tag of one."
            )
        self._num_samples = int((state or {}).get("memfit_num_samples", 0))
        self._ending.note_done()

    @contextmanager
    def whole_weights(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Have all parameters whole inside this block, by name; every rank has to.

        In stage 3 that takes a whole model's memory on each rank. Buffers are as ever in the model.
        """
        import deepspeed

        parameters = dict(self.model.named_parameters())
        gathered = deepspeed.zero.GatheredParameters(
            [*parameters.values()], enabled=self._choice.shards_weights
        )
        with gathered:
            yield {name: each.detach() for name, each in parameters.items()}

    def close(self) -> None:
        """Let go of the engine's hooks."""
        self._ending.close()
        self._watch.close()
        self.engine.destroy()


@dataclass(frozen=True, slots=True, kw_only=True)
class _AgreedStep:
    """How every rank carries out a step."""

    num_passes: int
    num_samples: int
    """Of all ranks."""


def _agree(num_samples: int, num_passes: int, broken: str, device: torch.device) -> _AgreedStep:
    """Return how many passes all ranks make, the most that one of them needs.

    They agree before the first pass of a step, so that none waits for ever. In stage 2 and 3 ranks
    exchange something in every pass, so that all need equally many.

    Args:
        num_samples: of this rank.
        num_passes: that this rank needs.
        broken: why this rank cannot weigh its batch; empty where it can.
        device: which ranks can send from.

    Raises:
        StrategyError: on all ranks, if one has fewer samples than passes are needed.
        BatchConditionError: on a rank whose batch cannot be weighed.
        OtherRankError: on the others then.
    """
    most = torch.tensor([num_passes, -num_samples, int(bool(broken))], device=device)
    total = torch.tensor([num_samples], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    needed, least = int(most[0]), -int(most[1])
    if broken:
        raise BatchConditionError("DeepSpeed's ranks and passes", broken)
    if most[2]:
        raise OtherRankError("its batch cannot be cut exactly")
    if least < needed:
        reason = (
            f"a rank needs {needed} passes, and another has {least} sample(s). Give every rank at "
            f"least {needed} samples, or take a larger micro_batch_size."
        )
        raise StrategyError("DeepSpeed", reason)
    return _AgreedStep(num_passes=needed, num_samples=int(total))


class _PieceWeights:
    """Weigh the pieces of a step so that an engine's average over ranks is the mean of all samples.

    An engine divides the sum of all ranks' gradients by the number of ranks, in each pass (stage 2
    and 3) or before the update (stage 0 and 1). A mean loss is weighed by its share of the samples
    of all ranks. Of a ``Total`` the count is known only after its forward: gradients are divided by
    what the first pieces lead one to expect, and by the true rest before the update, where the
    engine divides by its loss scale anyway, before it clips (unscale_and_clip_grads,
    deepspeed/runtime/zero, 0.19.8).

    Args:
        num_samples: of all ranks in this step.
        num_passes: of each rank.
        device: which ranks can send from.
    """

    def __init__(self, num_samples: int, num_passes: int, device: torch.device) -> None:
        self._num_samples, self._num_passes, self._device = num_samples, num_passes, device
        self._num_ranks = dist.get_world_size()
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._expected: float | None = None
        self._is_total: bool | None = None

    def weighed(self, loss: torch.Tensor | Total, num_in_piece: int) -> torch.Tensor:
        """Return what to give to the engine's backward for one piece.

        Raises:
            JobFunctionError: if some losses are a ``Total`` and others a mean.
        """
        is_total = isinstance(loss, Total)
        if self._is_total not in {None, is_total}:
            reason = "it returned a Total for one piece of the batch and a mean for another"
            raise JobFunctionError("loss", expected_signature("loss"), reason)
        self._is_total = is_total
        if not isinstance(loss, Total):
            self._add(loss.detach() * num_in_piece, num_in_piece)
            return loss * (num_in_piece * self._num_ranks / self._num_samples)
        self._add(loss.sum.detach(), loss.count)
        if self._expected is None:
            first = torch.as_tensor(loss.count).detach().to(self._device, torch.float64, copy=True)
            dist.all_reduce(first)
            self._expected = float(first) * self._num_passes or float(self._num_samples)
        return loss.sum * (self._num_ranks / self._expected)

    def finish(self) -> tuple[torch.Tensor, float]:
        """Return the mean loss over all ranks, and what gradients are still to be divided by."""
        dist.all_reduce(self._sums)
        mean = self._sums[0] / self._sums[1]
        rest = 1.0 if self._expected is None else float(self._sums[1]) / self._expected
        return mean, rest

    def _add(self, part: torch.Tensor, count: torch.Tensor | float) -> None:
        self._sums[0] += part.to(self._sums)
        self._sums[1] += torch.as_tensor(count).detach().to(self._sums)


@contextmanager
def _divided_gradients(engine: Any, divisor: float) -> Iterator[None]:
    """Have an engine divide the gradients of its next update, before they are clipped.

    Args:
        engine: of DeepSpeed.
        divisor: 1.0 leaves them alone.
    """
    if divisor == 1.0:
        yield
        return
    if not engine.zero_optimization():
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        yield
        return
    optimizer = engine.optimizer
    optimizer.external_loss_scale = float(optimizer.loss_scale) * divisor
    optimizer.custom_loss_scaler = True
    try:
        yield
    finally:
        optimizer.custom_loss_scaler = False
        optimizer.external_loss_scale = None
