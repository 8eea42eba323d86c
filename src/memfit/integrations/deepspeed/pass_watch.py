"""Watches forwards and backwards for what an engine would train otherwise than PyTorch, unsaid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memfit.errors import JobFunctionError, StrategyError
from memfit.job import expected_signature
from memfit.session.block_names import first_few


class PassWatch:
    """See that every pass goes through the engine, and that every parameter has a gradient.

    ZeRO updates parameters in flat pieces, so that one without a gradient has a gradient of zero:
    weight decay and momentum move it, where PyTorch leaves it alone. In stage 3 weights are whole
    only inside the forward of the model; a loss that calls its layers alone has gradients that are
    wrong without an error (deepspeed 0.19.8, found by comparison).

    Args:
        model: the module inside the engine.
        optimizer: the job's own, before the engine has it.
        shards_weights: whether it is stage 3.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, shards_weights: bool
    ) -> None:
        decays = {
            parameter: float(group.get("weight_decay", 0.0))
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p in decays]
        self._names = [name for name, _ in named]
        self._decays = [decays[parameter] != 0.0 for _, parameter in named]
        self._seen = [False] * len(named)
        self._ever = [False] * len(named)
        self._is_computing = False
        self._depth = 0
        self._hooks: list[Any] = [
            parameter.register_hook(partial(self._note_gradient, number))
            for number, (_, parameter) in enumerate(named)
        ]
        if shards_weights:
            self._watch_calls(model)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have a loss be computed inside; backward, which may call layers again, is not."""
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing, self._depth = False, 0

    def check_gradients(self, device: torch.device) -> None:
        """Refuse an update that would move parameters which no rank has a gradient of.

        Raises:
            StrategyError: on all ranks, with their names.
        """
        seen = torch.tensor(self._seen, dtype=torch.int32, device=device)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        found = seen.bool().tolist()
        self._seen = [False] * len(found)
        moved = [
            name
            for name, has, decays, before in zip(
                self._names, found, self._decays, self._ever, strict=True
            )
            if not has and (decays or before)
        ]
        self._ever = [has or before for has, before in zip(found, self._ever, strict=True)]
        if moved:
            reason = (
                f"{first_few(moved)} took no part in the step, and ZeRO would move them by weight "
                "decay or momentum all the same, where PyTorch leaves them alone. Freeze them "
                "(requires_grad_(False)), or leave them out of the optimizer."
            )
            raise StrategyError("DeepSpeed", reason)

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def _note_gradient(self, number: int, _: torch.Tensor) -> None:
        self._seen[number] = True

    def _watch_calls(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            hook = partial(self._enter_model if module is model else self._check_inside, name)
            self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))
        self._hooks.append(model.register_forward_hook(self._leave_model, always_call=True))

    def _enter_model(self, *_: object) -> None:
        self._depth += 1

    def _leave_model(self, *_: object) -> None:
        self._depth -= 1

    def _check_inside(self, name: str, *_: object) -> None:
        if self._is_computing and self._depth == 0:
            reason = (
                f"it calls {name} by itself, whose weights are whole only inside the model's own "
                "forward in stage 3. Call model(batch) alone, or take stage 2"
            )
            raise JobFunctionError("loss", expected_signature("loss"), reason)
