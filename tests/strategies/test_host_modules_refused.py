"""What cannot compute on the host, and what a caller would see otherwise, is refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import memfit
from memfit.devices.catalogue import load_device
from memfit.errors import MemfitError, StrategyError
from memfit.prediction.recording import record
from memfit.session.spill import Spill
from memfit.strategies import Fp16, HostModules, build_strategy
from memfit.strategies.host_modules.crossing import HostForward
from memfit.strategies.host_modules.weights import host_facts

from .host_places import CARD, WIDTH, Around, Cloning, job_of, under


class TiedOutside(Around):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.side.weight


class SharesMemory(Around):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = nn.Parameter(self.side.weight.data)


class SharesBuffer(Around):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.side.register_buffer("mean", self.mean)


class Listed(Around):
    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH)]))

    def combined(self, hidden):
        return self.side[0](hidden)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (TiedOutside, "side.weight belongs to last as well"),
        (SharesBuffer, "mean belongs to the model itself as well"),
        (Listed, "side only holds other modules"),
        (lambda: nn.Sequential(Around()), "no module named 'side' (near: 0.side"),
    ],
    ids=["tied", "buffer", "container", "name"],
)
def test_what_cannot_be_parted_is_refused(model, says):
    facts = record(job_of(model), device=load_device(CARD)).facts
    obstacle = HostModules(modules=("side",)).obstacle(facts)
    assert obstacle is not None
    assert says in obstacle
    assert obstacle.endswith(".")
    with pytest.raises(StrategyError) as caught:
        memfit.predict(job_of(model), CARD, under("side"))
    assert says in str(caught.value)


def test_memory_that_is_shared_with_the_device_is_refused():
    """Moving a model to a GPU parts such tensors; those of a model that lives there are not."""
    model = SharesMemory()
    obstacle = host_facts(model, torch.optim.SGD(model.parameters())).obstacle(["side"])
    assert obstacle is not None
    assert "side.weight cannot be moved to the host: it shares its memory" in obstacle


def test_on_the_cpu_it_is_refused_as_nothing_would_be_saved():
    with pytest.raises(StrategyError, match="on the cpu the host is the device"):
        memfit.start(job_of(Around), under("side"))


def test_no_module_at_all_is_refused():
    with pytest.raises(StrategyError, match="at least one module"):
        build_strategy("host-modules", {"modules": []})


class WritesInPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1


class WritesPastAutograd(nn.Module):
    def forward(self, x):
        x.data.mul_(2)
        return x + 1


class WritesToDictionary(nn.Module):
    def forward(self, parts):
        parts["new"] = parts["one"] + 1
        return parts["new"] * 2


class GivesView(nn.Module):
    def forward(self, x):
        return x[:, :3]


class GivesBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x):
        return self.table


@dataclass
class Wrapped:
    value: torch.Tensor


class GivesObject(nn.Module):
    def forward(self, x):
        return Wrapped(x + 1)


@pytest.mark.parametrize(
    ("module", "given", "says"),
    [
        (WritesInPlace, lambda x: x, "changes a tensor that it is given"),
        (WritesPastAutograd, lambda x: x, "changes a tensor that it is given"),
        (WritesToDictionary, lambda x: {"one": x}, "changes a list or a dictionary"),
        (GivesView, lambda x: x, "view of what it is given"),
        (GivesBuffer, lambda x: x, "one of its buffers"),
        (GivesObject, lambda x: x, "gives a Wrapped"),
    ],
    ids=["in place", "past autograd", "dictionary", "view", "buffer", "object"],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_a_caller_would_see_otherwise_is_refused(module, given, says, mode):
    made = module()
    made.forward = HostForward("side", made, Cloning(torch.device("cpu"), Spill()))
    with mode(), pytest.raises(StrategyError, match=says):
        made(given(torch.ones(2, WIDTH) * 1))


def test_writes_are_seen_in_later_calls_as_well():
    """The third call has no look at single operators."""
    writes = False

    class Later(nn.Module):
        def forward(self, x):
            return x.mul_(2) if writes else x + 1

    made = Later()
    made.forward = HostForward("side", made, Cloning(torch.device("cpu"), Spill()))
    made(torch.ones(2)), made(torch.ones(2))
    writes = True
    with pytest.raises(StrategyError, match="changes a tensor"):
        made(torch.ones(2))


class ReadFromOutside(Around):
    def combined(self, hidden):
        return hidden @ self.side.weight


def test_weights_that_are_read_from_outside_of_the_forward_end_a_prediction():
    with pytest.raises((MemfitError, RuntimeError), match=r"different devices|cpu|on the host"):
        memfit.predict(job_of(ReadFromOutside), CARD, under("side"))


def test_the_planner_leaves_it_to_the_user_and_says_so():
    with pytest.raises(StrategyError, match="for you to say, in a plan of your own"):
        memfit.plan(job_of(Around), device=CARD, require=["host-modules"])


def test_training_in_float16_is_refused_whoever_asks_for_it():
    """A gradient scaler would copy its scale to the host's gradients, and not wait for it."""
    with pytest.raises(StrategyError, match="without waiting for the copy"):
        memfit.predict(job_of(Around), CARD, under("side", beside=(Fp16(),)))
    made = nn.Linear(WIDTH, WIDTH)
    made.forward = HostForward("side", made, Cloning(torch.device("cpu"), Spill()))
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            made(torch.ones(2, WIDTH))
        with pytest.raises(StrategyError, match="without waiting for the copy"):
            made(torch.ones(2, WIDTH))


def test_a_learning_rate_on_the_device_is_refused():
    job = job_of(
        Around, optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1, device="cuda"))
    )
    with pytest.raises(StrategyError, match="lr is a tensor on the device"):
        memfit.predict(job, CARD, under("side"))
