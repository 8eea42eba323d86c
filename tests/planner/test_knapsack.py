"""What to keep inside a block: the frontier of kept bytes against recomputed seconds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memfit.planner.recompute.knapsack import Item, Trade, frontier, spread, undominated

ITEMS = st.lists(
    st.builds(
        lambda num_bytes, unneeded_bytes, seconds: (num_bytes, unneeded_bytes, float(seconds)),
        st.none() | st.integers(0, 30),
        st.integers(0, 30),
        st.integers(0, 8),
    ).map(lambda entry: (*entry[:1], min(entry[0] or 0, entry[1]), entry[2])),
    max_size=9,
)


def items_of(entries) -> list[Item]:
    return [
        Item(name=f"op.{i}", num_bytes=num_bytes, unneeded_bytes=unneeded, seconds=seconds)
        for i, (num_bytes, unneeded, seconds) in enumerate(entries)
    ]


def every_trade(items: list[Item]) -> list[Trade]:
    """Try every subset of what can be kept."""
    can_be_kept = [item for item in items if item.num_bytes is not None]
    found = []
    for kept in itertools.product((False, True), repeat=len(can_be_kept)):
        keep = [item for item, is_kept in zip(can_be_kept, kept, strict=True) if is_kept]
        found.append(
            Trade(
                sum(item.num_bytes for item in keep),
                sum(item.seconds for item in items if item not in keep),
                sum(item.unneeded_bytes for item in keep),
                tuple(item.name for item in keep),
            )
        )
    return found


def curve(trades) -> list[tuple[int, float]]:
    return [(trade.num_bytes, trade.seconds) for trade in trades]


@pytest.mark.slow
@given(ITEMS)
def test_the_frontier_is_that_of_all_subsets(entries):
    items = items_of(entries)
    assert curve(frontier(items)) == curve(undominated(every_trade(items)))


@pytest.mark.slow
@given(ITEMS)
def test_every_trade_is_what_its_kept_results_add_up_to(entries):
    items = items_of(entries)
    possible = every_trade(items)
    assert all(trade in possible for trade in frontier(items))


@pytest.mark.slow
@given(ITEMS)
def test_along_the_frontier_more_bytes_are_fewer_seconds(entries):
    found = curve(frontier(items_of(entries)))
    assert found[0][0] == 0 or not entries
    for (less_bytes, more_seconds), (more_bytes, less_seconds) in itertools.pairwise(found):
        assert less_bytes < more_bytes
        assert more_seconds > less_seconds


def test_no_trade_that_is_left_out_beats_one_that_is_kept():
    trades = [Trade(5, 1.0), Trade(3, 2.0), Trade(4, 2.0), Trade(3, 2.5), Trade(0, 9.0)]
    assert curve(undominated(trades)) == [(0, 9.0), (3, 2.0), (5, 1.0)]


def test_of_equal_trades_the_one_with_more_use_for_backward_is_kept():
    trades = [Trade(3, 2.0, 3, ("a",)), Trade(3, 2.0, 1, ("b",))]
    assert undominated(trades) == [Trade(3, 2.0, 1, ("b",))]


def test_many_operators_give_few_trades_that_reach_from_nothing_to_all():
    items = items_of([(2**i, 0, float(3**i)) for i in range(20)])
    found = frontier(items)
    assert len(found) <= 512
    assert found[0].keep == ()
    assert len(found[-1].keep) == 20


@pytest.mark.slow
@given(st.lists(st.integers(0, 1000), min_size=1, unique=True), st.integers(2, 12))
def test_spread_keeps_both_ends_and_no_more_than_asked(sizes, num_points):
    trades = [Trade(size, float(-size)) for size in sorted(sizes)]
    kept = spread(trades, num_points)
    assert kept[0] == trades[0]
    assert kept[-1] == trades[-1]
    assert len(kept) == len(set(kept)) <= max(num_points, 1)
    assert kept == sorted(kept, key=lambda trade: trade.num_bytes)
    assert set(kept) <= set(trades)
    if len(trades) <= num_points:
        assert kept == trades


def test_spread_is_even_in_bytes_where_there_are_enough():
    """Beside the corners, which are the two ends here."""
    kept = spread([Trade(size, -float(size**2)) for size in range(1001)], 11)
    sizes = [trade.num_bytes for trade in kept]
    assert sizes[0] == 0
    assert sizes[-1] == 1000
    assert max(later - before for before, later in itertools.pairwise(sizes)) <= 125


@given(
    st.lists(st.integers(1, 1000), min_size=3, max_size=40, unique=True),
    st.lists(st.integers(1, 1000), min_size=40, max_size=40),
)
def test_spread_keeps_what_is_best_at_some_price_of_a_byte(sizes, gains):
    seconds, trades = 100_000.0, [Trade(0, 100_000.0)]
    for size, gain in zip(sorted(sizes), gains, strict=False):
        seconds -= gain
        trades.append(Trade(size, seconds))
    slopes = [
        (before.seconds - later.seconds) / (later.num_bytes - before.num_bytes)
        for before, later in itertools.pairwise(trades)
    ]
    assume(any(later > before for before, later in itertools.pairwise(slopes)))
    kept = spread(trades, len(trades) - 1)  # so one at least is no corner
    for price in (0.01, 0.1, 1.0, 10.0, 100.0):
        costs = [trade.seconds + price * trade.num_bytes for trade in trades]
        assert min(t.seconds + price * t.num_bytes for t in kept) == min(costs)


def test_a_small_result_that_saves_much_is_an_option_among_large_ones():
    """Attention of a block of a transformer: 2 of 34 MiB, and half of the block's seconds."""
    large = [(4, 0, 1.0), (8, 0, 2.0), (2, 0, 0.5), (8, 0, 0.5), (8, 0, 0.1), (2, 0, 0.4)]
    trades = frontier(items_of([(2, 0, 6.0), *large]))
    assert len(trades) > 12
    assert ("op.0",) in [trade.keep for trade in spread(trades, 10)]
