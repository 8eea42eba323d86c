"""Refuses trainings whose window is not the Trainer's own, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.errors import MemfitError

_KNOWN = ("transformers.", "trl.", "memfit.")
_OWN_LOOPS = ("_inner_training_loop", "_run_epoch")


def check_is_trainer(trainer: Any) -> None:
    """Refuse what is no Trainer of transformers with the window that is needed.

    Raises:
        MemfitError: if it is none.
    """
    kinds = [kind.__module__ for kind in type(trainer).__mro__]
    if "transformers.trainer" not in kinds:
        msg = f"A transformers.Trainer is needed, not a {type(trainer).__name__}."
        raise MemfitError(msg)
    if not hasattr(trainer, "_run_epoch"):
        msg = (
            "This version of transformers has no `Trainer._run_epoch`, in whose windows a plan "
            "takes hold: pip install 'transformers>=5.20'."
        )
        raise MemfitError(msg)


def check_supported(trainer: Any) -> None:
    """Refuse trainings that hand no window to a plan.

    Raises:
        MemfitError: with the reason and what there is instead.
    """
    check_is_trainer(trainer)
    for is_so, reason in _REASONS:
        if is_so(trainer):
            msg = f"This training cannot be planned: {reason.format(_own_step(trainer))}."
            raise MemfitError(msg)


def _has_engine(trainer: Any) -> bool:
    return any(
        getattr(trainer, name, False)
        for name in (
            "is_deepspeed_enabled",
            "is_fsdp_enabled",
            "is_fsdp_xla_enabled",
            "is_distributed_loading_by_transformers",
        )
    )


def _has_several(trainer: Any) -> bool:
    several = trainer.args.world_size > 1 or trainer.args.n_gpu > 1
    return bool(several or trainer.is_model_parallel)


def _is_compiled(trainer: Any) -> bool:
    kind = type(trainer.model_wrapped).__name__
    return bool(trainer.args.torch_compile) or kind == "OptimizedModule"


def _steps_in_backward(trainer: Any) -> bool:
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    return "lomo" in name or "layerwise" in name


def _switches_parameters(trainer: Any) -> bool:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return callable(getattr(optimizer, "train", None))


def _generates(trainer: Any) -> bool:
    return hasattr(trainer, "_generate_and_score_completions")


def _own_step(trainer: Any) -> str:
    """Name the class outside the known libraries that has a training step of its own."""
    return _owner_of(trainer, "training_step")


def _own_loop(trainer: Any) -> bool:
    return any(_owner_of(trainer, name) for name in _OWN_LOOPS)


def _owner_of(trainer: Any, name: str) -> str:
    for kind in type(trainer).__mro__:
        if name in vars(kind):
            function = vars(kind)[name]
            module = f"{getattr(function, '__module__', kind.__module__)}."
            return "" if module.startswith(_KNOWN) else kind.__name__
    return ""


def _is_lbfgs(trainer: Any) -> bool:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return isinstance(optimizer, torch.optim.LBFGS)


def _offloads(trainer: Any) -> bool:
    checkpointing = getattr(trainer.args, "activation_checkpointing_kwargs", None) or {}
    return bool(getattr(trainer.args, "activation_offloading", False)) or bool(
        checkpointing.get("offload", False)
    )


_ENGINE = (
    "under DeepSpeed and FSDP parameters are sharded or stepped by an engine of its own, to which "
    "the Trainer hands the window; with ZeRO-3 it refuses auto_find_batch_size as well. "
    "memfit.start runs FSDP2 itself"
)
_SEVERAL = (
    "it runs on several devices or processes, whose windows have to be undone together. Run it in "
    "one process; memfit.start guards several"
)
_COMPILED = (
    "the model is compiled, and what a compiled step keeps is not known beforehand. Train without "
    "torch_compile"
)
_IN_BACKWARD = (
    "its optimizer updates parameters during backward, so that no gradients of a window are there "
    "to be added up. Choose another with TrainingArguments(optim=...)"
)
_SCHEDULE_FREE = (
    "its optimizer is schedule-free: it exchanges the parameters whenever training and evaluation "
    "take turns, which a window that is undone must not"
)
_GENERATES = (
    "it generates its batches with the model itself, so what a step takes depends on what is "
    "generated. `memfit run` watches it"
)
_OFFLOADS = (
    "it keeps activations on the host itself. Leave activation_offloading out: a plan does so "
    "where it is needed"
)
_OWN_STEP = (
    "{} has a training_step of its own, and what it does after going backward cannot be cut. "
    "Override compute_loss instead; `memfit run` watches it as it is"
)
_REASONS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (_has_engine, _ENGINE),
    (_has_several, _SEVERAL),
    (_is_compiled, _COMPILED),
    (_steps_in_backward, _IN_BACKWARD),
    (_switches_parameters, _SCHEDULE_FREE),
    (_is_lbfgs, "LBFGS runs its closure several times for one step"),
    (_generates, _GENERATES),
    (_offloads, _OFFLOADS),
    (_own_step, _OWN_STEP),
    (_own_loop, "it has a training loop of its own. `memfit run` watches it as it is"),
)
