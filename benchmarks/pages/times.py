"""The section on estimated seconds of operators and steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import starmap

from .blocks import Figures, table


def operator_times(figures: Figures) -> Iterator[str]:
    """Write, for each device, steps first and then the classes of operators."""
    yield (
        "Estimated over measured seconds: `bare` by the roofline alone, `estimate` as plans are "
        "ordered by, with what each [class of operators](how-planning-works.md#times) reaches. In "
        "brackets the 10th and the 90th percentile. The shares were fitted to the operators of "
        "`cpu` and of the H200, and those of norms and recurrent layers to its other steps as well."
        " The H100 was timed afterwards, and changed none of them."
    )
    for name, device in figures["devices"].items():
        yield _about(name, device)
        if "recorded_steps" in device:
            yield _recorded(device["recorded_steps"])
        yield table("step | seconds | bare | estimate", "lrrr", map(_step, device["steps"]))
        yield table(
            "class | operators | bare | estimate",
            "lrrr",
            starmap(_class, device["classes"].items()),
        )


def _recorded(found: Figures) -> str:
    bare, estimate = found["bare"], found["estimate"]
    return (
        f"{found['num_steps']} other steps, of the kinds of models and precisions that "
        f"`record_gpu.py` records: bare {_spread(bare)}, from {bare['least']:.2f} to "
        f"{bare['most']:.2f}; estimate {_spread(estimate)}, from {estimate['least']:.2f} to "
        f"{estimate['most']:.2f}."
    )


def _step(step: Figures) -> tuple[str, ...]:
    ratios = (f"{step[name]:.2f}" for name in ("bare_of_measured", "estimate_of_measured"))
    return (step["step"], f"{step['seconds']:.4f}", *ratios)


def _class(name: str, found: Figures) -> tuple[object, ...]:
    return (name, found["num_operators"], _spread(found["bare"]), _spread(found["estimate"]))


def _about(name: str, device: Figures) -> str:
    bare = [step["bare_of_measured"] for step in device["steps"]]
    found = [step["estimate_of_measured"] for step in device["steps"]]
    card = device["card"] if name != "cpu" else f"{device['num_threads']} thread"
    return (
        f"**{name}** ({card}, torch {device['torch']}, {device['date']}): "
        f"{device['num_operators']:,} operators. {len(found)} steps: bare {min(bare):.2f} to "
        f"{max(bare):.2f} of the measured seconds, median {statistics.median(bare):.2f}; estimate "
        f"{min(found):.2f} to {max(found):.2f}, median {statistics.median(found):.2f}."
    )


def _spread(ratios: Figures) -> str:
    return f"{ratios['median']:.2f} ({ratios['p10']:.2f} to {ratios['p90']:.2f})"
