"""What a job reaches only by an import as it runs is found, put back after asking, and said."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import Job
from memfit.separation.effects import find_effects
from memfit.session.batches import find_layout
from memfit.strategies.micro_batching import MicroBatching

_PARTS = {
    "__init__": "",
    "counts": """
        NUM = 0
        def count():
            global NUM
            NUM += 1
            return 1 + 0.1 * NUM
        """,
    "late": """
        COUNTS = {"forward": 0}
        """,
    "models": """
        import functools, random
        import torch
        from torch import nn
        from .counts import count

        CHOICES, SEEN, TABLE = random.Random(7), [], torch.ones(4)

        def counted(forward):
            calls = 0
            @functools.wraps(forward)
            def inner(self, x):
                nonlocal calls
                calls += 1
                return forward(self, x) * (1 + 0.1 * calls)
            return inner

        class InGlobal(nn.Module):
            def forward(self, x):
                return x * count()

        class InClass(nn.Module):
            num_calls = 0
            def forward(self, x):
                type(self).num_calls += 1
                return x * (1 + 0.1 * self.num_calls)

        class InDecorator(nn.Module):
            @counted
            def forward(self, x):
                return x

        class Draws(nn.Module):
            def forward(self, x):
                return x * TABLE * CHOICES.random()

        class ImportsLate(nn.Module):
            def forward(self, x):
                from far_parts import late
                late.COUNTS["forward"] += 1
                return x * (1 + 0.1 * late.COUNTS["forward"])

        class ByName(nn.Module):
            def forward(self, x):
                name = f"calls_of_{type(self).__name__}"
                globals()[name] = globals().get(name, 0) + 1
                return x * (1 + 0.1 * globals()[name])

        @functools.lru_cache(maxsize=1)
        def meter():
            return {"num": 0}

        class Remembers(nn.Module):
            def forward(self, x):
                meter()["num"] += 1
                return x * (1 + 0.1 * meter()["num"])

        def hook(module, arguments, output):
            SEEN.append(1)
            return output * (1 + 0.1 * len(SEEN))

        def build(*kinds):
            first = nn.Linear(4, 4)
            first.register_forward_hook(hook)
            return nn.Sequential(first, *(kind() for kind in kinds), nn.Linear(4, 1))

        def build_all():
            return build(InGlobal, InClass, InDecorator, Draws, ImportsLate, ByName)
        """,
    "optimizers": """
        import torch

        class Slowing(torch.optim.SGD):
            num_updates = 0
            def step(self, closure=None):
                type(self).num_updates += 1
                for group in self.param_groups:
                    group["lr"] = 0.1 / self.num_updates
                return super().step(closure)
        """,
    "data": """
        import torch
        NUM_BATCHES = [0]
        def collate(rows):
            NUM_BATCHES[0] += 1
            return torch.stack(rows) * (1 + 0.1 * NUM_BATCHES[0])
        """,
}


def part(name: str) -> Any:
    return importlib.import_module(f"far_parts.{name}")


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give what forgets the parts, so that they are imported as in a new process."""
    folder = tmp_path / "far_parts"
    folder.mkdir()
    for name, text in _PARTS.items():
        lines = [line[8:] for line in text.splitlines()]
        (folder / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)

    def forget() -> None:
        for name in [each for each in sys.modules if each.startswith("far_parts")]:
            del sys.modules[name]

    yield forget
    forget()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def job(**given: Any) -> Job:
    functions: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1),
        "batch": lambda size: torch.randn(size, 4),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    return Job(batch_size=6, **{**functions, **given})


def all_behind_imports() -> Job:
    return job(
        model=lambda: part("models").build_all(),
        batch=lambda size: part("data").collate([torch.randn(4) for _ in range(size)]),
        loss=lambda model, batch: loss(model, batch) * part("counts").count(),
        optimizer=lambda parameters: part("optimizers").Slowing(parameters, lr=0.1),
    )


def losses(made: Job, *, num_steps: int = 2) -> list[float]:
    torch.manual_seed(0)
    model = made.model()
    optimizer = made.optimizer(model.parameters())
    found = []
    for step in range(num_steps):
        torch.manual_seed(step)
        value = made.loss(model, made.batch(made.batch_size))
        found.append(float(value.detach()))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("ask", [memfit.predict, memfit.measure])
def test_asking_leaves_it_as_a_fresh_import_does(ask, parts):
    expected = losses(all_behind_imports())
    parts()
    ask(all_behind_imports())
    assert type(part("models").TABLE) is torch.Tensor  # none of the recording's
    assert losses(all_behind_imports()) == expected


def test_it_is_put_back_where_the_module_was_loaded_before_and_no_import_is_seen():
    part("models")
    made = job(model=lambda: __import__("far_parts.models", fromlist=["build"]).build())
    memfit.predict(made)
    assert part("models").SEEN == []


def test_what_a_step_changes_there_is_named():
    made = all_behind_imports()
    found = {each.full_name for each in find_effects(made, find_layout(made))}
    expected = {"NUM", "num_calls", "SEEN", "forward", "calls_of_ByName", "num_updates"}
    assert all(any(name in each for each in found) for name in expected), found


@pytest.mark.filterwarnings("ignore:micro-batching.2. could not be proved")
def test_a_run_in_pieces_trains_as_whole_batches_do(parts):
    def build() -> nn.Module:
        models = part("models")
        return models.build(models.InClass, models.ImportsLate)

    def counting(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) * importlib.import_module("far_parts.counts").count()

    made = job(model=build, loss=counting)
    run_losses = []
    torch.manual_seed(0)
    with memfit.start(made, memfit.Plan(strategies=(MicroBatching(micro_batch_size=2),))) as run:
        for step in range(2):
            torch.manual_seed(step)
            run_losses.append(float(run.step(made.batch(made.batch_size)).loss))
    parts()
    assert run_losses == pytest.approx(losses(made), rel=1e-5)


def test_what_the_functions_of_another_job_reach_is_put_back():
    calls = [0]

    def counting(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        return loss(model, batch) * calls[0]

    other = job(loss=counting)
    made = replace(other, loss=lambda model, batch: other.loss(model, batch))
    memfit.predict(made)
    assert calls == [0]
    (effect,) = find_effects(made, find_layout(made))
    assert "calls" in effect.full_name


def test_a_recording_puts_back_arrays_of_numpy():
    calls = np.zeros(1)

    def counting(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        return loss(model, batch) * float(calls[0])

    memfit.predict(job(loss=counting))
    assert calls == [0]


def test_a_package_keeps_the_modules_that_asking_has_loaded():
    package = importlib.import_module("far_parts")

    def counting(model: nn.Module, batch: Any) -> torch.Tensor:
        import far_parts.late

        assert far_parts.late is package.late
        return loss(model, batch) * (1 + package.late.COUNTS["forward"])

    memfit.predict(job(loss=counting))
    assert losses(job(loss=counting))


def test_what_a_cache_remembers_is_forgotten_after_asking_and_counted_once_a_step():
    asked = job(model=lambda: part("models").build(part("models").Remembers))
    memfit.measure(asked)
    plan = memfit.plan(asked, require=["micro-batching"])
    assert part("models").meter.cache_info().currsize == 0

    with memfit.start(asked, plan, guard=False) as run:
        for _ in range(2):
            run.step(asked.batch(6))
    assert part("models").meter() == {"num": 2}
