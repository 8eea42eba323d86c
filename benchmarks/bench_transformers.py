"""Trainers of transformers as people write them, under half of their plain peak.

Run: python benchmarks/bench_transformers.py [NAME ...]     (a quarter of an hour on two cores)

The three trainings of ``transformers_trainers`` know nothing of memfit: a BERT classifier, a GPT-2
from its configuration on texts of unlike lengths, whose windows count their tokens, and LoRA. Each
is predicted and planned from its trainer for half of the plain peak, and trained for 20 steps with
and without the plan from the same seed. Weights are compared in fp64 and fp32, as the largest
difference over the largest weight. A shortage of memory is raised inside one operator of backward.
Checkpoints of either training go on in the other.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results_file import load_result, save_result
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from transformers_trainers import NAMES, build, samples

from memfit.integrations.transformers import attach, plan, predict
from memfit.live_state.harmless import Instrument
from memfit.strategies.plan import Plan

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


class _InWindow(TrainerCallback):
    """Have memory run out in the third window."""

    def __init__(self) -> None:
        self.shortage = _Shortage()

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 2:
            self.shortage.__enter__()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 3:
            self.shortage.__exit__(None, None, None)


def main() -> None:
    """Go through the trainings and save what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = {row["training"]: row for row in _earlier().get("rows", ())}
    for name in sys.argv[1:] or NAMES:
        rows[name] = _row(name)
        save_result("transformers", {"rows": [*rows.values()]})


def _earlier() -> dict[str, Any]:
    try:
        return load_result("transformers")
    except FileNotFoundError:
        return {}


def _row(name: str) -> dict[str, Any]:
    trainer = build(name)
    weights = _copies(trainer.model)
    plain = predict(trainer)
    began = time.perf_counter()
    budget_bytes = int(plain.peak_allocated_bytes * _SHARE)
    found = plan(trainer, budget=budget_bytes)
    plan_seconds = time.perf_counter() - began
    copies = _copies(trainer.model)
    is_untouched = all(torch.equal(w, v) for w, v in zip(weights, copies, strict=True))
    assert found.prediction is not None
    bare = Plan(strategies=found.strategies, ladder=found.ladder)
    planned, attached = _trained(name, replace(bare, prediction=found.prediction))
    alone, _ = _trained(name)
    largest = _measured_on_largest(name, bare)
    plain_largest = _measured_on_largest(name, Plan())
    double = {"dtype": torch.float64}
    exact = _difference(_trained(name, **double)[0], _trained(name, bare, **double)[0])
    return {
        "training": name,
        "plain_peak_bytes": plain.peak_allocated_bytes,
        "plain_measured_on_largest_batch_bytes": plain_largest,
        "budget_bytes": budget_bytes,
        "strategies": list(found.labels()),
        "numerics": str(found.numerics),
        "plan_seconds": round(plan_seconds, 1),
        "predicted_peak_bytes": found.prediction.peak_allocated_bytes,
        "measured_peak_bytes": max(attached.measured_peak_bytes or 0, largest),
        "measured_on_largest_batch_bytes": largest,
        "prediction_error": round(found.prediction.peak_allocated_bytes / largest - 1, 5),
        "plain_prediction_error": round(plain.peak_allocated_bytes / plain_largest - 1, 5),
        "is_untouched_by_planning": is_untouched,
        "num_steps": _STEPS,
        "difference_fp64": exact,
        "difference_fp32": _difference(alone, planned),
        "difference_fp32_of_rounding": _difference(alone, _begun_otherwise(name)),
        **_shortage_row(name, bare),
        **_checkpoint_row(name, bare),
    }


def _trained(name: str, found: Plan | None = None, **options: Any) -> tuple[Any, Any]:
    """Train from the seed; give the model, and what was attached."""
    path = options.pop("path", None)
    trainer = build(name, **options)
    attached = None if found is None else attach(trainer, plan=found, rehearse=False)
    trainer.train(resume_from_checkpoint=path)
    return trainer.model, attached


def _begun_otherwise(name: str) -> Any:
    """Train alone from weights that are rounded otherwise, to see what becomes of rounding."""
    trainer = build(name)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1 + _ROUNDING * torch.randn(parameter.shape, generator=generator))
    trainer.train()
    return trainer.model


def _measured_on_largest(name: str, found: Plan) -> int:
    """Measure steps on the largest batch there is, with the optimizer's states."""
    rows = sorted(samples(is_causal=name != "bert"), key=lambda row: -len(row["input_ids"]))
    size = build(name).args.per_device_train_batch_size
    _, attached = _trained(name, found, rows=rows[:size] * 12, max_steps=3)
    return attached.measured_peak_bytes or 0


def _shortage_row(name: str, found: Plan) -> dict[str, Any]:
    options = {"dtype": torch.float64, "max_steps": _FEW_STEPS}
    shortage = _InWindow()
    guarded, attached = _trained(name, found, callbacks=[shortage], **options)
    events = [event for event in attached.events if hasattr(event, "next_plan")]
    return {
        "shortage_in": shortage.shortage.operator,
        "shortage_went_on_with": [*events[0].next_plan] if events else [],
        "difference_after_shortage": _difference(_trained(name, **options)[0], guarded),
    }


def _checkpoint_row(name: str, found: Plan) -> dict[str, Any]:
    options = {"dtype": torch.float64, "max_steps": _FEW_STEPS}
    saving = {"save_strategy": "steps", "save_steps": _FEW_STEPS // 2}
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for kind, given in (("plain", None), ("planned", found)):
            _trained(name, given, output_dir=f"{folder}/{kind}", **saving, **options)
            paths[kind] = Path(folder) / kind / f"checkpoint-{_FEW_STEPS // 2}"
        names = [sorted(each.name for each in path.iterdir()) for path in paths.values()]
        states = [torch.load(path / "optimizer.pt") for path in paths.values()]
        ends = [
            _trained(name, given, path=str(paths[kind]), output_dir=f"{folder}/on", **options)[0]
            for kind, given in (("plain", None), ("planned", None), ("plain", found))
        ]
    groups = [state["param_groups"] for state in states]
    return {
        "checkpoints_have_the_same_files": names[0] == names[1],
        "optimizer_groups_are_the_same": groups[0] == groups[1],
        "difference_resumed_without": _difference(ends[0], ends[1]),
        "difference_resumed_with": _difference(ends[0], ends[2]),
    }


def _copies(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def _difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Return the largest difference of two models' weights over the largest weight."""
    pairs = [*zip(_copies(one), _copies(other), strict=True)]
    largest = max(value.abs().max().item() for value, _ in pairs if value.is_floating_point())
    apart = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
    return float(f"{apart / largest:.2g}")


if __name__ == "__main__":
    main()
