"""fp16: forward and loss run under autocast in float16, and the loss is scaled."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from memfit.devices.spec import CPU
from memfit.session.block_names import first_few
from memfit.session.session import PhaseListener, Session, clip_gradients
from memfit.strategies.autocast import AbstractAutocast
from memfit.strategies.base import CHOOSES_TYPE, Numerics, Seam, Undo
from memfit.strategies.facts import JobFacts
from memfit.trace.events import Category

_SCALER = "gradient_scaler"


@dataclass(frozen=True, slots=True)
class Lstms:
    """Modules that are an LSTM, which the CPU does not train in every type."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fp16(AbstractAutocast):
    """Run forward and loss under ``torch.autocast`` with float16, with a gradient scaler.

    float16 cannot hold small gradients, so the loss is multiplied by a scale and the gradients are
    divided by it before they are clipped. The scale stays the same over the micro-batches of a
    batch. A gradient that is infinite or NaN skips the step of the whole batch and halves the
    scale; 2000 steps without one double it. Checkpoints keep the scale. ``keep`` names modules that
    compute as they would without it, as under bf16.

    Limits: approximate; relative rounding error 2^-11 per operation. The first steps may be skipped
    until the scale is found: a ``Total`` in micro-batches scales a sum, so its scale comes out
    smaller by the count. It saves nothing on parameters, gradients and optimizer states. bf16 needs
    no scale, where the device has it. A loss with an autocast or a scaler of its own is refused.
    Source: Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740, section 3.2;
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html on gradient accumulation.
    """

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL, Seam.FORWARD, Seam.WINDOW})
    goes_with_shards: ClassVar[bool] = True
    acts_on: ClassVar[Mapping[Category, float]] = {
        Category.SAVED_ACTIVATIONS: 0.5,
        Category.TEMPORARIES: 0.5,
    }
    excludes: ClassVar[Mapping[str, str]] = {"bf16": CHOOSES_TYPE}

    @classmethod
    def own_facts(cls, session: Session) -> Lstms:
        """Look for recurrent layers."""
        modules = session.model.named_modules()
        found = (name for name, module in modules if isinstance(module, torch.nn.LSTM))
        return Lstms(tuple(name or "the model" for name in found))

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse what has a type of its own, and recurrent layers that the CPU lacks in float16."""
        if "float16" in facts.parameter_dtypes:
            return (
                "the model has parameters in float16, whose gradients cannot be scaled back "
                "without loss. Build it in float32; autocast computes in float16 all the same."
            )
        lstms = facts.of(Lstms).names
        if facts.device_type == CPU and lstms:
            return (
                f"torch does not train an LSTM ({first_few(lstms)}) in float16 on the CPU. "
                "Allow bf16, which does the same with bfloat16."
            )
        return super().obstacle(facts)

    def apply(self, session: Session) -> Undo:
        """Add the autocast context, and scale around backward and update."""
        scaling = _LossScaling(session)
        with ExitStack() as undos:
            undos.callback(self.autocast(session))
            undos.callback(session.hold_state(_SCALER, scaling.scaler))
            undos.callback(
                session.replace(
                    gradient_pass=scaling.gradient_pass,
                    backward=scaling.backward,
                    update=scaling.update,
                )
            )
            return undos.pop_all().close


class _LossScaling:
    """Scale what is backpropagated, and unscale the gradients once they are complete."""

    def __init__(self, session: Session) -> None:
        self.scaler = torch.amp.GradScaler(session.device_type)
        self._gradient_pass = session.gradient_pass
        self._backward = session.backward
        self._is_unscaled = False

    def backward(self, part: torch.Tensor) -> None:
        """Backpropagate a part of the loss, times the scale."""
        self._backward(self.scaler.scale(part))

    def gradient_pass(
        self, session: Session, batch: Any, enter_phase: PhaseListener
    ) -> torch.Tensor:
        """Leave the true gradients in ``.grad``, as every gradient pass does."""
        if self._is_unscaled:  # an earlier pass was only tried: no update came after it
            self._forget_pass(session)
        loss = self._gradient_pass(session, batch, enter_phase)
        self._unscale(session)
        return loss

    def update(self, session: Session) -> None:
        """Clip and step, unless a gradient is infinite or NaN; then adapt the scale."""
        # A strategy applied later may have put its own gradient pass in place of this one.
        self._unscale(session)
        try:
            clip_gradients(session)
            self.scaler.step(session.optimizer)
        finally:  # a step that failed must not stand in the way of the next one
            self.scaler.update()
            self._is_unscaled = False

    def _forget_pass(self, session: Session) -> None:
        """Forget which gradients were unscaled, and keep the scale."""
        # Whoever tried the pass may have put everything back, the scaler from before its first use.
        self.scaler.scale(torch.ones((), device=session.device_type))
        self.scaler.update(self.scaler.get_scale())
        self._is_unscaled = False

    def _unscale(self, session: Session) -> None:
        """Divide the gradients by the scale, once a step."""
        if not self._is_unscaled:
            self.scaler.unscale_(session.optimizer)
            self._is_unscaled = True
