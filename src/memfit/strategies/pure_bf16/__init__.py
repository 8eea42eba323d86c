"""Pure bf16: parameters, gradients, activations and optimizer states in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

from memfit.devices.spec import CPU, CUDA
from memfit.session.session import Session, clip_gradients
from memfit.strategies.base import CHOOSES_TYPE, Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.strategies.pure_bf16.rounding import RoundedStep, StochasticRounding, is_shaped_like
from memfit.strategies.single_steps import PACKAGES, attachment_obstacle
from memfit.trace.events import Category, Phase

# With AdamW an update takes temporaries of about 24 bytes per element. The CPU is fastest where
# they stay near its caches; a GPU wants fewer and larger kernels.
_SLICE_ELEMENTS = {CPU: 2**18, CUDA: 2**23}
_STATEFUL = "stochastic_rounding"
_NOT_ALONE = ("LBFGS", "SparseAdam")


@dataclass(frozen=True, kw_only=True)
class PureBf16(Strategy):
    """Keep everything in bfloat16, and round updates up or down at random.

    AdamW takes 2 + 2 + 4 bytes per parameter instead of 16. The job's own optimizer computes each
    update in fp32, for a slice of one parameter at a time; parameter and states are then rounded
    stochastically, so that small updates are not lost. What the model is called with is cast to
    bfloat16; targets that the loss compares with stay as they are. Forward and loss run under
    autocast, so that fp32 tensors may meet bfloat16 and operators that need fp32 get it. Buffers
    stay as they are, and so do layers that keep running statistics.

    Limits: approximate; weights and the model's inputs keep a relative 2^-9, so positions and times
    should be given as integers. Gradients of micro-batches are added up in bfloat16. Optimizers
    that look at all parameters at once, or that are not known, are refused. The update takes fp32
    copies of a slice, of the largest parameter whole where the optimizer does not treat each
    element by itself. After undoing it, parameters are fp32 with rounded values.
    Source: Zamirai et al. 2020, https://arxiv.org/abs/2010.06192, on weight updates; torchao's
    ``bf16_stochastic_round``, https://github.com/pytorch/ao/tree/main/torchao/optim.
    """

    name: ClassVar[str] = "pure-bf16"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    seams: ClassVar[frozenset[Seam]] = frozenset(Seam) - {Seam.PROCESS}
    not_with_shards: ClassVar[str] = (
        "it changes the type of weights, which was settled when the ranks began to share them"
    )
    acts_on: ClassVar[Mapping[Category, float]] = dict.fromkeys(Category, 0.5)
    acts_in: ClassVar[tuple[Phase, ...]] = tuple(Phase)
    excludes: ClassVar[Mapping[str, str]] = {"bf16": CHOOSES_TYPE, "fp16": CHOOSES_TYPE}

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse models with nothing to shrink, and optimizers that need all parameters at once."""
        if "float32" not in facts.parameter_dtypes:
            found = ", ".join(facts.parameter_dtypes) or "none"
            return (
                f"no parameter that is trained is in float32 (found: {found}). To verify a plan, "
                "compare in float32: memfit.verify(..., dtype=torch.float32)."
            )
        if facts.optimizer_package not in PACKAGES or facts.optimizer in _NOT_ALONE:
            return (
                f"{facts.optimizer} may need all parameters at once, and each is updated alone; "
                f"optimizers of torch.optim can be, except {' and '.join(_NOT_ALONE)}. bf16 leaves "
                "the optimizer as it is."
            )
        return attachment_obstacle(facts)

    def apply(self, session: Session) -> Undo:
        """Convert parameters and optimizer states, cast inputs, and round updates."""
        before = {parameter: parameter.dtype for parameter in _parameters_to_convert(session.model)}
        with ExitStack() as undos:
            undos.callback(_convert, session.optimizer, before)  # memory may run out half-way
            _convert(session.optimizer, dict.fromkeys(before, torch.bfloat16))
            hook = session.model.register_forward_pre_hook(
                _cast_arguments, with_kwargs=True, prepend=True
            )
            undos.callback(hook.remove)
            context = partial(torch.autocast, session.device_type, dtype=torch.bfloat16)
            undos.callback(session.wrap_forward(context))
            rounding = StochasticRounding(session.device_type)
            step = RoundedStep(rounding, _SLICE_ELEMENTS[session.device_type])
            undos.callback(session.hold_state(_STATEFUL, rounding))
            undos.callback(session.replace(update=partial(_clip_and_step, step)))
            return undos.pop_all().close


def _clip_and_step(rounded: RoundedStep, session: Session) -> None:
    """Do as ``clip_and_step``, with rounding."""
    clip_gradients(session)
    rounded.step(session.optimizer)


def _parameters_to_convert(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters in fp32, but for those of layers that keep running statistics.

    Their kernels want parameters of the type of those statistics.
    """
    for module in model.modules():
        if getattr(module, "running_mean", None) is None:
            for parameter in module.parameters(recurse=False):
                if parameter.dtype is torch.float32:
                    yield parameter


def _convert(
    optimizer: torch.optim.Optimizer, dtypes: Mapping[torch.nn.Parameter, torch.dtype]
) -> None:
    """Convert parameters, their gradients and their optimizer states in place."""
    for parameter, dtype in dtypes.items():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(dtype)
        parameter.grad = None if gradient is None else gradient.to(dtype)
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if is_shaped_like(value, parameter):
                state[key] = value.to(dtype)


def _cast_arguments(
    _model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the floating-point tensors that a model is called with."""
    cast: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
        torch.Tensor, _in_bf16, (args, kwargs)
    )
    return cast


def _in_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
