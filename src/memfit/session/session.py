"""The Session: a job's live model and optimizer, and the places where strategies take hold."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.errors import JobFunctionError, LossNotScalarError, MemfitError
from memfit.job import Job, Total, build_optimizer, expected_signature
from memfit.session.absent_weights import check_weights_are_here
from memfit.session.batches import BatchLayout
from memfit.session.host_tensors import left_behind
from memfit.session.own_precision import scaling_refused
from memfit.session.spill import Spill
from memfit.session.storages import owned_tensors
from memfit.trace.modules import user_frames
from memfit.trace.owners import Owned
from memfit.trace.subclasses import known_parts_of

if TYPE_CHECKING:
    from memfit.session.carried_effects import CarriedEffects
    from memfit.session.shard_agreement import ShardAgreement

GradientPass = Callable[["Session", Any, "PhaseListener"], torch.Tensor]
"""Leaves the gradients of the mean loss over a batch in ``.grad``, and returns that loss."""
PhaseListener = Callable[[Any], None]
Backward = Callable[[torch.Tensor], None]
"""Backpropagates a loss, or its part from one micro-batch; gradients add up in ``.grad``."""
Update = Callable[["Session"], None]
"""Turns the gradients in ``.grad`` into new parameters: clips them and steps the optimizer."""


class Stateful(Protocol):
    """Something with a state of its own that a checkpoint must keep, such as a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state."""


class SharesModel(Protocol):
    """How the ranks of a process group share a model."""

    averages_after_backward: ClassVar[bool]
    """Whether whole gradients are averaged once every rank has its own."""

    def share(self, model: torch.nn.Module, device_type: str) -> None:
        """Share a whole model among the ranks, and bring it to their devices."""


def backpropagate(loss: torch.Tensor) -> None:
    """Backpropagate a loss as it is."""
    loss.backward()


def clip_and_step(session: Session) -> None:
    """Clip the gradients where the job asks for it, then step the optimizer."""
    clip_gradients(session)
    session.optimizer.step()


def clip_gradients(session: Session) -> None:
    """Clip the global gradient norm where the job asks for it."""
    if session.job.clip_grad_norm is not None:
        parameters = session.model.parameters()
        torch.nn.utils.clip_grad_norm_(parameters, session.job.clip_grad_norm)


@dataclass(slots=True)
class Session:
    """Hold what one job needs to be run; strategies change its fields."""

    job: Job
    device_type: str
    layout: BatchLayout
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    gradient_pass: GradientPass
    micro_batch_size: int
    forward_contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    backward: Backward = backpropagate
    update: Update = clip_and_step
    update_contexts: list[Callable[[torch.Tensor], AbstractContextManager[None]]] = field(
        default_factory=list
    )
    """Contexts around the update of one parameter, where parameters are updated one at a time."""
    updates_in_backward: bool = False
    """Whether parameters are updated while gradients are still being computed."""
    num_counted: torch.Tensor | float | None = None
    """What the latest loss was divided by, where the job gives a Total."""
    agreement: ShardAgreement | None = None
    """What ranks agree on in every step, where the model exchanges shards with them."""
    is_one_of_several: bool = False
    """Whether this rank's gradients and losses are averaged with those of others."""
    parallel: SharesModel | None = None
    """How ranks share the model and the effective batch; None where the job is one rank's own."""
    num_samples: int = 0
    """How many samples the latest step has had on this rank."""
    before_piece: Callable[[bool], Any] | None = None
    """Told before each micro-batch whether it is the last of its step."""
    loss_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes of a rank's loss that of all, once every rank has its gradients."""
    stateful: dict[str, Stateful] = field(default_factory=dict)
    """What checkpoints must keep besides model and optimizer, by name; always the same dict."""
    carried_effects: CarriedEffects | None = None
    """Has what forwards change happen once per step, where batches are run in pieces."""
    is_loss_known: bool = False
    """Whether the loss has been called, and need not be looked at again."""
    facts: Any = None
    """What strategies have found out of the job as it is; ``gather_facts`` gives it its type."""
    spill: Spill = field(default_factory=Spill)
    """What strategies keep outside the device's memory."""

    @property
    def is_virtual(self) -> bool:
        """Return whether the step is recorded on fake tensors, and nothing is really there."""
        return any(
            isinstance(part, FakeTensor)
            for parameter in self.model.parameters()
            for part in known_parts_of(parameter)
        )

    def replace(self, **values: Any) -> Callable[[], None]:
        """Set fields; return what sets them back."""
        before = {name: getattr(self, name) for name in values}
        self._set(values)
        return partial(self._set, before)

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def hold_state(self, name: str, part: Stateful) -> Callable[[], None]:
        """Have something with a state kept with the session; return what takes it away.

        The dict stays the same, so that whoever watches it sees what has come.
        """
        before = {key: value for key, value in self.stateful.items() if key == name}
        self.stateful[name] = part

        def undo() -> None:
            self.stateful.pop(name, None)
            self.stateful.update(before)

        return undo

    def wrap_forward(
        self, context: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[], None]:
        """Have forward and loss run inside a context; return what takes it away."""
        self.forward_contexts.append(context)
        return partial(self.forward_contexts.remove, context)

    def loss_of(self, batch: Any) -> torch.Tensor | Total:
        """Compute the loss of a (micro-)batch inside the contexts that strategies have asked for.

        Raises:
            LossNotScalarError: if the loss is neither a scalar tensor nor a Total of scalars.
            JobFunctionError: if it fails, or scales itself.
        """
        with ExitStack() as stack:
            for context in self.forward_contexts:
                stack.enter_context(context())
            if not self.is_loss_known:
                stack.enter_context(scaling_refused())
            loss: torch.Tensor | Total = _called(self.job, "loss", self.model, batch)
        self.is_loss_known = True
        check_loss(loss)
        return loss

    def owned_tensors(self, batch: Any) -> Iterable[Owned]:
        """Yield every tensor of the job whose purpose is known, but what is kept elsewhere."""
        for owned in owned_tensors(self.model, self.optimizer, batch):
            if not self.spill.holds(owned.tensor):
                yield owned


def open_session(
    job: Job,
    device_type: str,
    layout: BatchLayout,
    gradient_pass: GradientPass,
    parallel: SharesModel | None = None,
    *,
    stays: Callable[[torch.nn.Module], Iterable[torch.Tensor]] | None = None,
) -> Session:
    """Build a job's model and optimizer.

    Args:
        job: whose; of several ranks, with this rank's batch size.
        device_type: where to.
        layout: of its batches.
        gradient_pass: computes the gradients of a step.
        parallel: how ranks share the model; None leaves it as the job builds it.
        stays: chooses the parameters and buffers that are not brought to a GPU with the rest of the
            model; None brings all.

    Raises:
        JobFunctionError: if one of the job's functions fails or gives something else.
        WeightsNotHereError: if weights that are to be trained are kept elsewhere.
    """
    model = _built(job, "model", torch.nn.Module)
    check_weights_are_here(model)
    if parallel is not None:
        parallel.share(model, device_type)
    elif device_type != "cpu":
        with left_behind(model, () if stays is None else stays(model)):
            model.to(device_type)
    optimizer = _built(job, "optimizer", torch.optim.Optimizer, model.named_parameters())
    if device_type != "cpu":
        _bring_states(optimizer)
    return Session(
        job=job,
        device_type=device_type,
        layout=layout,
        model=model,
        optimizer=optimizer,
        gradient_pass=gradient_pass,
        micro_batch_size=job.batch_size,
        parallel=parallel,
    )


def _bring_states(optimizer: torch.optim.Optimizer) -> None:
    """Move the states of an optimizer that has taken steps to where its parameters are now.

    Step counts, which are single numbers, may stay on the host, as they do in ``torch.optim``.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and isinstance(state, dict):
                state[name] = value.to(parameter.device)


def check_loss(loss: Any) -> None:
    """Refuse a loss that is no scalar tensor and no Total of scalars."""
    value = loss.sum if isinstance(loss, Total) else loss
    if not isinstance(value, torch.Tensor):
        raise LossNotScalarError(f"a {type(value).__name__}")
    if value.dim() != 0:
        raise LossNotScalarError(f"a tensor of shape {tuple(value.shape)}")
    if torch.is_grad_enabled() and not value.requires_grad:
        found = "a tensor that does not require grad, so nothing would be trained"
        raise LossNotScalarError(found)


def _built(job: Job, function: str, kind: type, *args: Any) -> Any:
    """Call one of the job's functions and check what it gives."""
    value = _called(job, function, *args)
    if not isinstance(value, kind):
        reason = f"it returned a {type(value).__name__}"
        raise JobFunctionError(function, expected_signature(function), reason)
    return value


def _called(job: Job, function: str, *args: Any) -> Any:
    """Call one of the job's functions.

    Raises:
        JobFunctionError: if it fails for a reason of its own, with the place.
    """
    try:
        if function == "optimizer":
            return build_optimizer(job, *args)
        return getattr(job, function)(*args)
    except (MemfitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if _is_virtual_failure(error):
            raise
        reason = f"it raised {type(error).__name__}: {error} ({_place_of(error)})"
        raise JobFunctionError(function, expected_signature(function), reason) from error


def _place_of(error: Exception) -> str:
    """Name the last file and line that belong neither to torch nor to memfit."""
    frame = (user_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def _is_virtual_failure(error: Exception) -> bool:
    """Return whether fake tensors, not the job, are at fault."""
    return type(error).__module__.startswith("torch._subclasses")
