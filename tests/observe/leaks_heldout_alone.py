"""What programs that the leak finder was not tuned on have taught it."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from memfit.observe.leaks import LeakFinder, LeakLimits, rules
from memfit.observe.leaks.bounds import bounds_of_owner, bounds_of_program
from memfit.observe.leaks.histories import Moment, Point
from memfit.observe.leaks.outside import UnheldTensors
from memfit.observe.leaks.walk import take_look
from memfit.watch.inside.loaders import Loaders


def train(finder: LeakFinder, steps: int, each) -> tuple:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        each(step)
        finder.boundary("train", step)
    return finder.finish()


class Buffer:
    """A buffer, with a bound or without one."""

    def __init__(self, **bounds: int) -> None:
        self.__dict__.update(bounds)
        self.rows: list[torch.Tensor] = []
        self.bank = torch.empty(0, 4096)


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        ({}, ["buffer.rows"]),
        ({"capacity": 200}, []),
        ({"capacity": 60}, ["buffer.rows"]),  # it is past that
        ({"max_steps": 200}, ["buffer.rows"]),  # no number of entries
        ({"capacity": 100_000_000}, ["buffer.rows"]),  # more than there is room for
    ],
    ids=["none", "not reached", "passed", "of something else", "too large"],
)
def test_what_its_owner_states_a_bound_for_may_fill(bounds, found) -> None:
    buffer = Buffer(**bounds)
    finder = LeakFinder(overhead_fraction=1.0)
    events = train(finder, 130, lambda step: buffer.rows.append(torch.ones(30_000)))
    assert [event.holder for event in events] == found


@pytest.mark.parametrize(("length", "found"), [(300, []), (60, ["buffer.bank"])])
def test_a_tensor_has_as_many_entries_as_rows(length: int, found: list[str]) -> None:
    buffer = Buffer(length=length)

    def add(step: int) -> None:
        buffer.bank = torch.cat([buffer.bank, torch.ones(1, 4096)])

    limits = LeakLimits(least_bytes_per_step=8000)
    events = train(LeakFinder(overhead_fraction=1.0, limits=limits), 130, add)
    assert [event.holder for event in events] == found


def test_names_of_bounds() -> None:
    held = {"capacity": 5, "max_len": 6, "pool_size": 7, "hidden_size": 8, "step": 9, "max_": 1}
    assert bounds_of_owner(held.items()) == (5, 6, 7)
    script = {"CAPACITY": 5, "REPLAY_SIZE": 6, "batch_size": 7, "max_steps": 8, "size": 9}
    assert bounds_of_program(script.items()) == (5, 6)


@pytest.mark.parametrize(("every", "until", "found"), [(40, 280, ["kept"]), (30, 170, [])])
def test_a_list_that_grows_now_and_then_is_told(every: int, until: int, found: list[str]) -> None:
    kept = []

    def add(step: int) -> None:
        if step % every == every - 1 and step < until:
            kept.extend(torch.ones(100_000) for _ in range(5))

    events = train(LeakFinder(overhead_fraction=1.0), 280, add)
    assert [event.holder for event in events] == found


def test_what_grows_ever_more_slowly_climbs_no_stairs() -> None:
    def grows(size_at) -> bool:
        points = [
            Point(Moment(count=n, num_boundaries=n, pass_number=1), size_at(n), 0, 0, 0.0)
            for n in range(3, 400, 9)
        ]
        return rules._grows_in_bursts(points, lambda point: point.count, LeakLimits())

    assert grows(lambda step: step // 40)
    assert not grows(lambda step: int(1e6 * (1 - 0.997**step)))


def test_words_that_end_in_numbers_are_no_log() -> None:
    words = {f"word{number * 37 % 100}": torch.ones(3) for number in range(100)}
    log = {f"epoch{number // 10}-batch{number % 10}": torch.ones(3) for number in range(100)}
    ordered = {node.holder(): node.is_ordered for node in take_look().nodes.values()}
    assert (ordered["words"], ordered["log"]) == (False, True)
    del words, log


def test_what_has_no_path_of_its_own_is_not_followed() -> None:
    class Key:
        """A key without a name."""

    twins = {Key(): [torch.ones(3)], Key(): [torch.ones(3)]}
    alone = {Key(): [torch.ones(3)]}
    nodes = [node for node in take_look().nodes.values() if node.link == "<Key>"]
    told = {node.holder().partition("[")[0]: rules.is_container(node) for node in nodes}
    assert told == {"twins": False, "alone": True}
    del twins, alone


def test_what_a_cache_with_a_bound_keeps_is_not_unheld() -> None:
    @functools.lru_cache(maxsize=120)
    def features(step: int) -> torch.Tensor:
        return torch.ones(50_000)

    assert train(LeakFinder(overhead_fraction=1.0), 110, features) == ()


def test_entries_of_a_long_list_that_no_look_reads_are_not_unheld() -> None:
    kept = [torch.ones(10) for _ in range(300)]
    unheld = UnheldTensors()
    assert unheld.scan(take_look().seen, (10, 1000), 1) is None
    kept += [torch.ones(10) for _ in range(300)]
    assert unheld.scan(take_look().seen, (10, 1000), 2) is None
    assert unheld.is_growing


def test_what_memfit_keeps_itself_is_no_leak_of_the_program() -> None:
    own = types.new_class("Log", exec_body=lambda body: body.update(__module__="memfit.made_up"))
    log = own()
    log.entries = []
    log.model = nn.Linear(2, 2)
    log.model.outputs = []

    def add(step: int) -> None:
        log.entries.append(torch.ones(30_000))
        log.model.outputs.append(torch.ones(30_000))

    events = train(LeakFinder(overhead_fraction=1.0), 130, add)
    assert [event.holder for event in events] == ["log.model.outputs"]
    assert any(node.is_memfits for node in take_look().nodes.values())


# --- Passes of the loaders that train ---


def gone_through(loaders: Loaders, loader: DataLoader, start: int, steps: int) -> bool:
    """Go through a loader with a step per batch; say whether a pass was over before."""
    iterator = iter(loader)
    is_over = loaders.begin_pass(iterator, loader, None, start)
    for step in range(start, start + steps + 1):
        loaders.wanted(iterator, step)
    return is_over


def test_a_pass_of_training_is_over_when_its_loader_begins_anew() -> None:
    loaders, loader = Loaders(), DataLoader(torch.zeros(2, 1))
    assert not gone_through(loaders, loader, 0, 10)
    assert gone_through(loaders, loader, 10, 5)
    assert not gone_through(loaders, loader, 15, 10), "five steps are too few to tell anything"


def test_a_short_loader_beside_a_long_one_ends_no_pass() -> None:
    loaders = Loaders()
    long, short = DataLoader(torch.zeros(2, 1)), DataLoader(torch.zeros(3, 1))
    under_way = iter(long)
    loaders.begin_pass(under_way, long, None, 0)
    loaders.wanted(under_way, 0)
    loaders.wanted(under_way, 1)
    over = [gone_through(loaders, short, start, 10) for start in (0, 10, 20, 30)]
    assert over == [False] * 4
    assert loaders.begin_pass(iter(long), long, None, 40)
