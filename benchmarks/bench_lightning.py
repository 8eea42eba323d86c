"""Lightning modules as people write them, under half of their plain peak, beside themselves alone.

Run: python benchmarks/bench_lightning.py [NAME ...]        (a quarter of an hour on two cores)

The four modules of ``lightning_modules`` know nothing of memfit. Each is predicted and planned from
its trainer, for half of the plain peak, and trained for 20 steps with and without the callback from
the same seed. Weights are compared in fp64 and fp32, as the largest difference over the largest
weight; what becomes of other rounding alone is told beside it. A shortage of memory is raised
inside one operator of backward. Checkpoints of either training go on in the other. The price of a
step is processor time, of rounds that take turns.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import lightning_price
import torch
from results_file import load_result, save_result
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.integrations.lightning import MemfitCallback, plan, predict
from memfit.live_state.harmless import Instrument
from memfit.strategies.plan import Plan

_NAMES = ("image_classifier", "gpt", "contrastive", "ragged")
_SHARE = 0.5
_STEPS, _FEW_STEPS = 20, 4
_ROUNDING = 1e-7
"""About that of a number in fp32."""


class _Shortage(TorchDispatchMode, Instrument):
    """Raise what the CPU's allocator raises, once, at an operator of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.operator = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        is_fake = any(isinstance(each, FakeTensor) for each in args)
        if not self.operator and not is_fake and name.endswith("_backward.default"):
            self.operator = name
            msg = "DefaultCPUAllocator: can't allocate memory"
            raise RuntimeError(msg)
        return func(*args, **(kwargs or {}))


class _InBatch(L.Callback):
    """Have memory run out in the third batch."""

    def __init__(self) -> None:
        self.shortage = _Shortage()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.shortage.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.shortage.__exit__(None, None, None)


def main() -> None:
    """Go through the modules and save what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or [*_NAMES, "price"]
    rows = {row["module"]: row for row in _earlier().get("rows", ())}
    cost = _earlier().get("cost", {})
    for name in wanted:
        if name == "price":
            cost = lightning_price.of_a_step()
        else:
            rows[name] = _row(name)
        save_result("lightning", {"cost": cost, "rows": [*rows.values()]})


def _earlier() -> dict[str, Any]:
    try:
        return load_result("lightning")
    except FileNotFoundError:
        return {}


def _row(name: str) -> dict[str, Any]:
    module = importlib.import_module(f"lightning_modules.{name}")
    trainer, model, data = module.build(0)
    weights = _copies(model)
    plain = predict(trainer, model, data)
    began = time.perf_counter()
    budget_bytes = int(plain.peak_allocated_bytes * _SHARE)
    found = plan(trainer, model, data, budget=budget_bytes)
    plan_seconds = time.perf_counter() - began
    is_untouched = all(torch.equal(w, v) for w, v in zip(weights, _copies(model), strict=True))
    bare = Plan(strategies=found.strategies, ladder=found.ladder)
    callback = MemfitCallback(plan=replace(bare, prediction=found.prediction))
    single = _trained(module, callback), _trained(module)
    largest = _measured_on_largest(module, bare)
    double = {"dtype": torch.float64}
    alone = _trained(module, **double)
    planned = _trained(module, MemfitCallback(plan=bare), **double)
    assert found.prediction is not None
    return {
        "module": name,
        "plain_peak_bytes": plain.peak_allocated_bytes,
        "budget_bytes": budget_bytes,
        "strategies": list(found.labels()),
        "numerics": str(found.numerics),
        "plan_seconds": round(plan_seconds, 1),
        "predicted_peak_bytes": found.prediction.peak_allocated_bytes,
        "measured_peak_bytes": max(callback.measured_peak_bytes or 0, largest),
        "measured_on_largest_batch_bytes": largest,
        "prediction_error": round(found.prediction.peak_allocated_bytes / largest - 1, 5),
        "is_untouched_by_planning": is_untouched,
        "num_steps": _STEPS,
        "difference_fp64": _difference(alone, planned),
        "difference_fp32": _difference(*single),
        "difference_fp32_of_rounding": _difference(single[1], _begun_otherwise(module)),
        **_shortage_row(module, bare),
        **_checkpoint_row(module, bare),
    }


def _trained(module: Any, *callbacks: Any, path: Any = None, **options: Any) -> Any:
    """Train one of the modules from the seed, and give it."""
    options.setdefault("max_steps", _STEPS)
    trainer, model, data = module.build(0, **options)
    trainer.callbacks += callbacks
    loaders = {"datamodule": data} if isinstance(data, L.LightningDataModule) else {}
    trainer.fit(model, *(() if loaders else (data,)), **loaders, ckpt_path=path)
    return model


def _begun_otherwise(module: Any) -> Any:
    """Train alone from weights that are rounded otherwise, to see what becomes of rounding."""
    trainer, model, data = module.build(0, max_steps=_STEPS)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + _ROUNDING * torch.randn(parameter.shape, generator=generator))
    is_module = isinstance(data, L.LightningDataModule)
    trainer.fit(model, **({"datamodule": data} if is_module else {"train_dataloaders": data}))
    return model


def _measured_on_largest(module: Any, found: Plan) -> int:
    """Measure steps on the largest batch, with the optimizer's states."""
    from memfit.integrations.lightning.batches import largest_training_batch  # noqa: PLC0415

    kept: list[Any] = []

    class Keeping(L.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            kept.append(largest_training_batch(trainer))

    _trained(module, Keeping(), max_steps=1)
    trainer, model, _ = module.build(0, max_steps=3)
    callback = MemfitCallback(plan=found, rehearse=False)
    trainer.callbacks.append(callback)
    trainer.fit(model, torch.utils.data.DataLoader(kept * 3, batch_size=None))
    return callback.measured_peak_bytes or 0


def _shortage_row(module: Any, found: Plan) -> dict[str, Any]:
    options = {"dtype": torch.float64, "max_steps": _FEW_STEPS}
    shortage = _InBatch()
    callback = MemfitCallback(plan=found, rehearse=False)
    guarded = _trained(module, callback, shortage, **options)
    events = [event for event in callback.events if hasattr(event, "next_plan")]
    return {
        "shortage_in": shortage.shortage.operator,
        "shortage_went_on_with": [*events[0].next_plan] if events else [],
        "difference_after_shortage": _difference(_trained(module, **options), guarded),
    }


def _checkpoint_row(module: Any, found: Plan) -> dict[str, Any]:
    options = {"dtype": torch.float64}
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, callbacks in (("plain", []), ("planned", [MemfitCallback(plan=found)])):
            files[name] = Path(folder) / f"{name}.ckpt"
            _trained(module, *callbacks, _Saving(files[name]), max_steps=_FEW_STEPS, **options)
        plain = torch.load(files["plain"], weights_only=False)
        planned = torch.load(files["planned"], weights_only=False)
        ends = [
            _trained(module, *callbacks, path=files[name], max_steps=_FEW_STEPS, **options)
            for name, callbacks in (
                ("plain", []),
                ("planned", []),
                ("plain", [MemfitCallback(plan=found)]),
            )
        ]
    return {
        "checkpoints_have_the_same_keys": plain.keys() == planned.keys(),
        "difference_resumed_without": _difference(ends[0], ends[1]),
        "difference_resumed_with": _difference(ends[0], ends[2]),
    }


class _Saving(L.Callback):
    """Save a checkpoint half way: schedules know how long the training is."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == _FEW_STEPS // 2:
            trainer.save_checkpoint(self._path)


def _copies(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def _difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Return the largest difference of two modules' weights over the largest weight."""
    pairs = [*zip(_copies(one), _copies(other), strict=True)]
    largest = max(value.abs().max().item() for value, _ in pairs if value.is_floating_point())
    apart = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
    return float(f"{apart / largest:.2g}")


if __name__ == "__main__":
    main()
