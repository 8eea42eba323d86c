"""Every kind of thing that can hold state is kept, put back and told of."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memfit.errors import MemfitError
from memfit.live_state import Change, LiveState
from memfit.trace.recorder import Recorder
from memfit.virtual.tensors import virtual_tensors


class Thing:
    """Holds whatever it is given, and cannot be asked anything."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __eq__(self, other: object) -> bool:
        raise AssertionError("nobody may compare")

    __hash__ = object.__hash__

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("locked"):
            raise AssertionError("nobody may set this way")
        object.__setattr__(self, name, value)

    @property
    def trap(self) -> int:
        raise AssertionError("nobody may ask")


@dataclasses.dataclass(eq=False)
class Record:
    total: float = 0.0
    seen: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    total: float = 0.0
    late: Any = None


class Names(dict):
    """A dict with attributes and unusual methods."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("nobody may set this way")

    def clear(self) -> None:
        raise AssertionError("nobody may clear this way")


class Counter:
    instances = 0


def with_attribute() -> Callable[[], int]:
    def function() -> int:
        function.calls += 1
        return function.calls

    function.calls = 0
    return function


def with_default(log: list[int] = []) -> None:  # noqa: B006 - this is what is tested
    log.append(1)


def with_keyword(*, log: list[int] = []) -> None:  # noqa: B006 - this is what is tested
    log.append(1)


def moved(ordered: Any) -> None:
    ordered.move_to_end("a")


def drawn(generator: Any) -> None:
    generator.random()


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
SHARED = [1]
STORE = types.ModuleType("settings_of_a_user")
STORE.step = 0


def counts_in_a_module() -> None:
    STORE.step += 1
    STORE.fresh = [1]


def array(dtype: Any = float) -> Any:
    return np.zeros(4, dtype)


def set_item(target: Any, key: Any, value: Any) -> None:
    target[key] = value


CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "an attribute": (Thing(a=1), lambda t: setattr(t, "a", 2)),
    "an attribute of another type": (Thing(a=1), lambda t: setattr(t, "a", True)),
    "an attribute that comes": (Thing(), lambda t: setattr(t, "a", 1)),
    "an attribute that goes": (Thing(a=1), lambda t: delattr(t, "a")),
    "an attribute that cannot be set": (Thing(locked=1), lambda t: t.__dict__.update(locked=2)),
    "a whole dict of attributes": (Thing(a=1), lambda t: object.__setattr__(t, "__dict__", {"a": 2})),
    "a list that grows": (Thing(a=[]), lambda t: t.a.append(1)),
    "a list that is replaced": (Thing(a=[]), lambda t: setattr(t, "a", [])),
    "a list in a list": (Thing(a=[[1]]), lambda t: t.a[0].append(1)),
    "a list in a tuple": (Thing(a=([1],)), lambda t: t.a[0].append(1)),
    "a list in a frozen set's member": (Thing(a=frozenset((Thing(b=[]),))), lambda t: next(iter(t.a)).b.append(1)),
    "a list in itself": (CIRCLE, lambda t: t.append(1)),
    "a list held twice": (Thing(a=SHARED, b=SHARED), lambda t: t.a.append(1)),
    "a dict": (Thing(a={}), lambda t: set_item(t.a, "b", 1)),
    "a dict with another key": (Thing(a={1: True}), lambda t: (t.a.pop(1), set_item(t.a, 2, True))),
    "a dict with a tensor as key": (Thing(a={torch.zeros(1): [1]}), lambda t: t.a.clear()),
    "a dict's subclass": (Names(a=1), lambda t: dict.__setitem__(t, "a", 2)),
    "a default dict": (Thing(a=collections.defaultdict(list)), lambda t: t.a["b"].append(1)),
    "a counter": (Thing(a=collections.Counter("a")), lambda t: t.a.update("ab")),
    "an ordered dict": (Thing(a=collections.OrderedDict(a=1, b=2)), lambda t: moved(t.a)),
    "a deque": (Thing(a=collections.deque([1, 2], maxlen=2)), lambda t: t.a.append(3)),
    "a set": (Thing(a={1}), lambda t: t.a.add(2)),
    "a bytearray": (Thing(a=bytearray(b"a")), lambda t: t.a.extend(b"b")),
    "a dataclass": (Record(), lambda t: setattr(t, "total", 1.0)),
    "a list in a dataclass": (Record(), lambda t: t.seen.append(1)),
    "slots": (SlottedRecord(), lambda t: setattr(t, "total", 1.0)),
    "a slot that is emptied": (SlottedRecord(), lambda t: delattr(t, "late")),
    "a simple namespace": (types.SimpleNamespace(a=1), lambda t: setattr(t, "a", 2)),
    "a class": (Counter(), lambda t: setattr(Counter, "instances", 3)),
    "a class attribute that comes": (Counter(), lambda t: setattr(Counter, "fresh", 3)),
    "a function's attribute": (with_attribute(), lambda t: t()),
    "a default argument": (with_default, lambda t: t()),
    "a keyword's default": (with_keyword, lambda t: t()),
    "other default arguments": (with_default, lambda t: setattr(t, "__defaults__", ([],))),
    "a module of code": (counts_in_a_module, lambda t: t()),
    "a partial's arguments": (functools.partial(with_default, [1]), lambda t: t.args[0].append(1)),
    "a partial's keywords": (functools.partial(with_default, log=[1]), lambda t: t.keywords["log"].append(1)),
    "a bound method's object": (Record().seen.append, lambda t: t(1)),
    "what a method belongs to": (types.MethodType(lambda self: self.a.append(1), Thing(a=[])), lambda t: t()),
    "what a weak reference means": (Thing(a=(kept := Record()), b=weakref.ref(kept)), lambda t: t.b().seen.append(1)),
    "a weak dict": (Thing(a=weakref.WeakKeyDictionary({kept: [1]})), lambda t: t.a[kept].append(1)),
    "an array": (array(), lambda t: set_item(t, 0, 1)),
    "an array's not-a-number": (np.full(1, np.nan), lambda t: set_item(t, 0, -np.nan)),
    "an array of objects": (np.array([[1], None], dtype=object), lambda t: set_item(t, 1, 2)),
    "a list in an array": (np.array([[1], None], dtype=object), lambda t: t[0].append(1)),
    "an array's shape": (array(), lambda t: setattr(t, "shape", (2, 2))),
    "a view of an array": (array()[::2], lambda t: set_item(t, 0, 1)),
    "python's generator": (random.Random(1), drawn),
    "numpy's generator": (np.random.default_rng(1), drawn),
    "numpy's older generator": (np.random.RandomState(1), drawn),
    "numpy's bits": (Thing(a=np.random.PCG64(1)), lambda t: t.a.random_raw()),
    "torch's generator": (torch.Generator(), lambda t: torch.rand(1, generator=t)),
    "a tensor": (torch.zeros(2), lambda t: t.add_(1)),
    "a tensor written behind autograd's back": (torch.zeros(2), lambda t: t.data.add_(1)),
    "a tensor's sign of zero": (torch.zeros(2), lambda t: t.neg_()),
    "a tensor's bits of not-a-number": (torch.full((1,), torch.nan), lambda t: t.view(torch.int32).add_(1)),
    "a complex tensor": (torch.zeros(2, dtype=torch.complex64), lambda t: t.add_(1j)),
    "a tensor of truths": (torch.zeros(2, dtype=torch.bool), lambda t: t.fill_(True)),
    "a tensor of 8 bits": (torch.zeros(2).to(torch.float8_e5m2), lambda t: t.view(torch.uint8).add_(1)),
    "a transposed tensor": (torch.zeros(2, 3).T, lambda t: t.add_(1)),
    "an expanded tensor": (torch.zeros(1, 3).expand(2, 3), lambda t: t[0].add_(1)),
    "an empty tensor that grows": (torch.zeros(0), lambda t: t.resize_(3)),
    "a tensor that shrinks": (torch.ones(4), lambda t: t.resize_(2)),
    "a tensor of other data": (torch.ones(4), lambda t: setattr(t, "data", torch.zeros(2))),
    "a tensor of another dtype": (torch.ones(4), lambda t: setattr(t, "data", t.data.double())),
    "a tensor in other memory": (torch.ones(4), lambda t: t.set_(torch.zeros(3))),
    "a tensor turned in place": (torch.ones(2, 3), lambda t: t.t_()),
    "a tensor whose storage is freed": (torch.ones(4), lambda t: t.untyped_storage().resize_(0)),
    "a tensor's requires_grad": (torch.ones(4), lambda t: t.requires_grad_()),
    "a tensor that joined a graph": (torch.ones(2), lambda t: t.mul_(torch.ones(2, requires_grad=True))),
    "a tensor's attribute": (torch.ones(2), lambda t: setattr(t, "note", 1)),
    "a tensor's hook": (torch.ones(2, requires_grad=True), lambda t: t.register_hook(print)),
    "a parameter": (nn.Linear(2, 2), lambda t: setattr(t, "weight", nn.Parameter(torch.ones(2, 2)))),
    "a parameter that goes": (nn.Linear(2, 2), lambda t: setattr(t, "bias", None)),
    "a module that comes": (nn.Linear(2, 2), lambda t: setattr(t, "more", nn.Linear(1, 1))),
    "a module's hook": (nn.Linear(2, 2), lambda t: t.register_forward_hook(print)),
    "a parametrization": (nn.Linear(2, 2), lambda t: nn.utils.parametrizations.weight_norm(t)),
    "the training flag": (nn.Linear(2, 2), lambda t: t.eval()),
    "a buffer that does not persist": (nn.Linear(2, 2), lambda t: t.register_buffer("b", torch.ones(1), persistent=False)),
    "python's global generator": (Thing(), lambda t: random.random()),
    "numpy's global generator": (Thing(), lambda t: np.random.rand()),
    "torch's global generator": (Thing(), lambda t: torch.rand(1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_told_and_put_back(case: str) -> None:
    root, change = CASES[case]
    state = LiveState({"root": root})
    snapshot = state.snapshot()
    assert snapshot.changes() == ()
    change(root)
    assert snapshot.changes(), "nothing was told"
    snapshot.restore()
    assert snapshot.changes() == ()
    later = LiveState({"root": root}).snapshot()
    change(root)
    assert later.changes(), "the second change is not a change any more"
    later.restore()
    assert snapshot.changes() == ()
    assert state.obstacles == ()


def told(state: LiveState, change: Callable[[], Any]) -> list[tuple[str, str, str]]:
    snapshot = state.snapshot()
    change()
    found = [(each.owner, each.name, each.kind.value) for each in snapshot.changes()]
    snapshot.restore()
    return found


def test_a_change_names_its_owner_and_its_kind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].calls, model[0].cache = 0, {}
    state = LiveState({"model": model})

    def change() -> None:
        model[0].calls += 1
        model[0].cache["a"] = 1
        model[1].running_mean += 1
        model[1].register_forward_hook(print)
        model[1].eval()
        model[0].bias = None

    found = told(state, change)
    assert ("model.0", "calls", "attribute") in found
    assert ("model.0", "cache", "container") in found
    assert ("model.1", "running_mean", "tensor") in found
    assert ("model.1", "_forward_hooks", "hook") in found
    assert ("model.1", "training", "attribute") in found
    assert ("model.0", "bias", "binding") in found


def test_only_what_is_bound_is_watched_of_tensors_that_are_left_out() -> None:
    model = nn.Linear(2, 2)
    before = model.weight
    state = LiveState({"model": model, "view": model.weight.detach()[0]}, leave_out=[before])
    snapshot = state.snapshot()
    with torch.no_grad():
        before.add_(1)
    assert snapshot.changes() == ()
    content = before.detach().clone()
    model.weight = nn.Parameter(torch.zeros(2, 2))
    snapshot.restore()
    assert model.weight is before
    assert torch.equal(before, content)


def test_gradients_belong_to_the_state_where_asked() -> None:
    model = nn.Linear(2, 2)
    state = LiveState({"model": model}, gradients=True)
    snapshot = state.snapshot()
    model(torch.ones(1, 2)).sum().backward()
    assert len(snapshot.changes()) == 2
    snapshot.restore()
    assert model.weight.grad is None
    model(torch.ones(1, 2)).sum().backward()
    kept = model.weight.grad
    snapshot = state.snapshot()
    model(torch.ones(1, 2)).sum().backward()
    snapshot.restore()
    assert model.weight.grad is kept
    assert torch.equal(kept, torch.ones(2, 2))


def test_later_snapshots_find_what_has_come_since() -> None:
    model = Thing(a=None)
    state = LiveState({"model": model})
    state.snapshot()
    for _ in range(4):
        model.a = [torch.zeros(1), {"count": 0}]
        snapshot = state.snapshot()
        model.a[0] += 1
        model.a[1]["count"] += 1
        names = [change.full_name for change in snapshot.changes()]
        assert sorted(names) == ["model.a[0]", "model.a[1]"]
        snapshot.restore()
        assert float(model.a[0]) == 0
        assert model.a[1] == {"count": 0}


def test_several_snapshots_live_side_by_side() -> None:
    thing = Thing(a=torch.zeros(1), b=[0])
    state = LiveState({"root": thing})
    snapshots = []
    for step in range(3):
        snapshots.append(state.snapshot())
        thing.a += 1
        thing.b.append(step)
    for step in (1, 2, 0):
        snapshots[step].restore()
        assert float(thing.a) == step
        assert len(thing.b) == step + 1


def test_what_a_user_let_go_is_let_go_after_the_next_snapshot() -> None:
    thing = Thing(a=Record())
    state = LiveState({"root": thing})
    state.snapshot()
    seen = weakref.ref(thing.a)
    for _ in range(2):
        thing.a = Record()
        state.snapshot()
    assert seen() is None


OBSTACLES: dict[str, tuple[Any, str]] = {
    "a generator of values": ((each for each in [1]), "iterator"),
    "an iterator": (iter([1, 2]), "iterator"),
    "a lock": (threading.Lock(), "lock"),
    "a thread": (threading.Thread(), "thread"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_cannot_be_put_back_is_said(case: str) -> None:
    value, kind = OBSTACLES[case]
    (obstacle,) = LiveState({"model": Thing(source=value)}).obstacles
    assert (obstacle.owner, obstacle.kind) == ("model", kind)
    assert obstacle.sentence.startswith("model.source is a")


def test_an_open_file_is_an_obstacle(tmp_path: Any) -> None:
    with (tmp_path / "log").open("w") as file:
        (obstacle,) = LiveState({"model": Thing(log=file)}).obstacles
    assert obstacle.kind == "file"


def test_a_tensor_that_cannot_leave_its_graph_is_said_when_it_is_put_back() -> None:
    base = torch.zeros(2)
    thing = Thing(part=base[:1], count=0)
    snapshot = LiveState({"model": thing}).snapshot()
    thing.count = 1
    thing.part.mul_(torch.ones(1, requires_grad=True))
    with pytest.raises(MemfitError, match=r"model\.part"):
        snapshot.restore()
    assert thing.count == 0


def test_what_a_recording_on_fake_tensors_leaves_is_put_back() -> None:
    model = nn.BatchNorm1d(3)
    model.last, model.calls, model.log = None, 0, []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = LiveState({"model": model})
    snapshot = state.snapshot()
    with virtual_tensors(), Recorder() as recorder:
        model.last = model(torch.zeros(4, 3))
        model.calls += 1
        model.log.append(model.last)
        num_operations = len(recorder.history.operations)
        inside = state.snapshot()
        assert {change.name for change in snapshot.changes()} >= {"last", "calls", "log"}
        model.calls += 1
        inside.restore()
        assert len(recorder.history.operations) == num_operations
        assert model.calls == 1
    snapshot.restore()
    assert (model.last, model.calls, model.log) == (None, 0, [])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_names_that_code_imports_while_it_runs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("late_settings_of_a_user")
    module.step = 0
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)

    def loss() -> None:
        import late_settings_of_a_user

        late_settings_of_a_user.step += 1

    snapshot = LiveState({"loss": loss}).snapshot()
    loss()
    assert [change.full_name for change in snapshot.changes()] == ["late_settings_of_a_user.step"]
    snapshot.restore()
    assert module.step == 0


def test_a_tensor_too_large_to_copy_is_an_obstacle_and_its_change_is_told() -> None:
    thing = Thing(small=torch.zeros(2), large=torch.zeros(100), count=0)
    state = LiveState({"model": thing}, most_bytes=100)
    (obstacle,) = state.obstacles
    assert obstacle.kind == "size"
    assert "model.large" in obstacle.sentence
    snapshot = state.snapshot()
    thing.small += 1
    thing.count += 1
    snapshot.restore()
    thing.large += 1
    thing.count += 1
    assert {change.name for change in snapshot.changes()} == {"large", "count"}
    with pytest.raises(MemfitError, match="too large"):
        snapshot.restore()
    assert thing.count == 0
    assert float(thing.small.sum()) == 0


def test_states_that_the_optimizer_makes_later_are_bound_but_not_copied() -> None:
    model = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    roots = {"model": model, "optimizer": optimizer}
    state = LiveState(roots, leave_out=model.parameters(), most_bytes=1000)
    before = state.snapshot()
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    assert {change.name for change in before.changes()} == {"state"}
    after = state.snapshot()
    assert state.obstacles == ()
    optimizer.step()
    assert after.changes() == ()
    before.restore()
    assert dict(optimizer.state) == {}


def test_a_hook_on_a_parameter_that_comes_later_stays_where_it_was_there() -> None:
    model = nn.Linear(2, 2)
    state = LiveState({"model": model}, leave_out=model.parameters())
    state.snapshot()
    seen: list[int] = []
    model.weight.register_hook(lambda _: seen.append(1))
    snapshot = state.snapshot()
    model.bias.register_hook(lambda _: seen.append(2))
    model(torch.ones(1, 2)).sum().backward()
    assert seen
    snapshot.restore()
    assert seen == []
    model(torch.ones(1, 2)).sum().backward()
    assert seen == [1]


def test_hooks_that_a_restore_puts_back_are_seen_by_later_snapshots() -> None:
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(print)
    state = LiveState({"model": model})
    old = state.snapshot()
    handle.remove()
    state.snapshot()
    old.restore()
    new = state.snapshot()
    handle.remove()
    assert [change.kind.value for change in new.changes()] == ["hook"]


def test_flags_that_change_between_steps_are_those_that_are_put_back() -> None:
    model = nn.Linear(2, 2)
    state = LiveState({"model": model}, leave_out=model.parameters())
    state.snapshot()
    model.weight.requires_grad_(False)
    snapshot = state.snapshot()
    model.bias.requires_grad_(False)
    snapshot.restore()
    assert not model.weight.requires_grad
    assert model.bias.requires_grad


def test_what_is_replaced_in_every_step_is_walked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Thing(hidden=torch.zeros(2), queue=collections.deque(maxlen=3), calls=0, me=None)
    model.me = model
    state = LiveState({"model": model})

    def step() -> None:
        model.hidden = torch.ones(2)
        model.queue.append(torch.ones(1))
        model.queue.append(model)
        model.queue.append(torch.ones(1))
        model.calls += 1

    for _ in range(4):
        step()
        state.snapshot()
    stays, moves = state.found()
    assert not moves.seen.keys() & stays.seen.keys()
    monkeypatch.setattr(LiveState, "_walk", lambda _: pytest.fail("everything was walked again"))
    for _ in range(3):
        step()
        snapshot = state.snapshot()
        model.hidden += 1
        model.queue[-1].add_(1)
        assert {change.full_name for change in snapshot.changes()} >= {"model.hidden"}
        snapshot.restore()
        assert float(model.hidden[0]) == float(model.queue[-1]) == 1


def test_what_both_model_and_optimizer_hold_is_named_after_the_model() -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2))))
    roots = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    snapshot = LiveState(roots).snapshot()
    with torch.no_grad():
        model[0][0][0].bias.add_(1)
    assert [change.full_name for change in snapshot.changes()] == ["model.0.0.0.bias"]


def test_the_whole_of_torch_is_not_walked() -> None:
    def loss(model: Any, x: Any) -> Any:
        return torch.nn.functional.mse_loss(model(x), np.asarray(x))

    state = LiveState({"loss": loss, "model": nn.Linear(2, 2)})
    assert sum(len(group.targets) for group in state._found.groups.values()) < 100


def test_changes_are_data() -> None:
    assert str(Change("model", "a", "attribute", "was 1, is 2")) == "model.a: was 1, is 2"


def _renamed(held: dict[Any, Any]) -> None:
    held["new"] = held.pop("last")


ONLY_THE_ORDER_OR_THE_NAMES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "another key": ({"first": 1, "last": "x"}, _renamed),
    "another key, ordered": (collections.OrderedDict(first=1, last="x"), _renamed),
    "another order": (
        collections.OrderedDict(first=1, last=1),
        lambda held: held.move_to_end("first"),
    ),
    "another attribute": (Thing(first=1, last="x"), lambda held: _renamed(held.__dict__)),
    "equal, another object": (["x", 1000], lambda held: held.__setitem__(1, int("1000"))),
    "one in, one out": ({"a", "b"}, lambda held: (held.remove("a"), held.add("c"))),
    "round and round": (collections.deque([1, 2, 3]), lambda held: held.rotate(1)),
}


@pytest.mark.parametrize("name", ONLY_THE_ORDER_OR_THE_NAMES)
def test_each_snapshot_has_the_names_of_its_moment(name: str) -> None:
    held, change = ONLY_THE_ORDER_OR_THE_NAMES[name]

    def shown() -> list[Any]:
        content = held.__dict__ if isinstance(held, Thing) else held
        if isinstance(content, set):
            return sorted(content)  # which comes first differs from process to process
        return [*content.items()] if isinstance(content, dict) else [*content]

    state = LiveState({"root": Thing(held=held)})
    moments = [(state.snapshot(), shown()), (state.snapshot(), shown())]
    change(held)
    moments += [(state.snapshot(), shown()), (state.snapshot(), shown())]
    for snapshot, then in (*reversed(moments), *moments):
        snapshot.restore()
        assert shown() == then
        assert snapshot.changes() == ()
    assert moments[0][1] != moments[-1][1] or name == "equal, another object"


def test_looking_at_a_freed_tensor_leaves_it_freed() -> None:
    """Torch makes a storage anew that something is laid over."""
    tensor = torch.ones(1000)
    then = LiveState({"root": tensor}).snapshot()
    tensor.untyped_storage().resize_(0)
    freed = LiveState({"root": tensor}).snapshot()
    assert "given back" in str(then.changes()[0])
    assert freed.changes() == ()
    assert tensor.untyped_storage().nbytes() == 0
    then.restore()
    assert torch.equal(tensor, torch.ones(1000))
    assert "memory again" in str(freed.changes()[0])
    freed.restore()
    assert tensor.untyped_storage().nbytes() == 0
