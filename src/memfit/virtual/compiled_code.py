"""Has compiled code run as it was written while a step is recorded.

Torch's compiler leaves code alone under a dispatch mode, and refuses where it was told to compile
all of it (``fullgraph=True``), as torchao's optimizers do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

_NOTE = (
    "It asks for torch.compile, and the code is recorded as it was written: compiled, it usually "
    "takes less memory and time (`memfit measure` tells)"
)


class CompiledCode:
    """Tell whether code asked to be compiled."""

    def __init__(self) -> None:
        self.was_asked_for = False
        """Whether ``torch.compile`` was called."""

    def notes(self, model: torch.nn.Module | None = None) -> Sequence[str]:
        """Say so where code is compiled otherwise, of the model's modules or while recording.

        Limits: functions that were compiled before are not noticed.
        """
        modules = () if model is None else model.modules()
        is_compiled = any(
            hasattr(each, "_torchdynamo_orig_callable") or each._compiled_call_impl is not None
            for each in modules
        )
        return (_NOTE,) if self.was_asked_for or is_compiled else ()

    @contextmanager
    def run_eagerly(self) -> Iterator[None]:
        """Run compiled code as it was written inside.

        What was compiled before is run eagerly. What would be compiled inside is left as it is: the
        compiler looks torch's functions up once and for all, and some of them are replaced here.
        """
        with ExitStack() as stack:
            if "torch._dynamo.eval_frame" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(patch.object(torch, "compile", self._leave))
            yield

    def _leave(self, model: Any = None, **options: Any) -> Any:
        """Return a function or a module uncompiled; without one, what does so."""
        self.was_asked_for = True
        if model is None:
            return partial(self._leave, **options)
        if isinstance(model, torch.nn.Module):
            vars(model)["_orig_mod"] = model  # where code looks for the module that was compiled
        return model
