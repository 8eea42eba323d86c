"""Options for the blocks of a chain: the fastest assignment that fits, against trying them all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memfit.planner.recompute.assignment import fastest, frontier, smallest
from memfit.planner.recompute.chain import Chain, ChainBlock, Option

STORE_BYTES = st.integers(0, 60)


@st.composite
def options_of_a_block(draw) -> tuple[Option, ...]:
    saved_bytes = draw(STORE_BYTES)
    store = Option(
        recomputes=False, keep=(), saved_bytes=saved_bytes, unneeded_bytes=0, seconds=0.0
    )
    again = [
        Option(
            recomputes=True,
            keep=(f"mm.{number}",),
            saved_bytes=draw(st.integers(0, saved_bytes)),
            unneeded_bytes=draw(st.integers(0, 10)),
            seconds=float(draw(st.integers(0, 9))),
            follows_recomputed=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    return (store, *again)


@st.composite
def chains(draw) -> Chain:
    amount = st.integers(0, 80)
    blocks = [
        ChainBlock(
            name=str(number),
            options=draw(options_of_a_block()),
            forward_bytes=draw(amount),
            backward_bytes=draw(amount),
            recompute_bytes=draw(amount),
            gap_bytes=draw(amount),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    return Chain(blocks=tuple(blocks), elsewhere_bytes=draw(st.integers(0, 150)))


def every_assignment(chain: Chain) -> list[tuple[int, float]]:
    """Try all: peaks with seconds."""
    found = filter(may_be, itertools.product(*(block.options for block in chain.blocks)))
    return [
        (chain.peak_bytes(options), sum(option.seconds for option in options)) for options in found
    ]


def may_be(options: Sequence[Option]) -> bool:
    """Return whether what follows only what is computed again does."""
    pairs = itertools.pairwise((None, *options))
    return all(
        before is not None and before.recomputes
        for before, option in pairs
        if option.follows_recomputed
    )


def least_seconds(tried: list[tuple[int, float]], budget_bytes: int) -> float | None:
    return min((s for peak_bytes, s in tried if peak_bytes <= budget_bytes), default=None)


@pytest.mark.slow
@given(chains())
def test_the_fastest_assignment_is_the_fastest_of_all_at_every_budget(chain):
    tried = every_assignment(chain)
    for budget_bytes in sorted({peak_bytes + off for peak_bytes, _ in tried for off in (-1, 0)}):
        assume(budget_bytes >= 0)
        found = fastest(chain, budget_bytes)
        expected = least_seconds(tried, budget_bytes)
        assert (found and found.seconds) == expected
        if found is not None:
            assert found.peak_bytes <= budget_bytes
            assert found.peak_bytes == chain.peak_bytes(found.options)
            assert may_be(found.options)


def moving(chain: Chain, draw: random.Random) -> Chain:
    """Let some blocks move their inputs away when they are computed again."""

    def with_move(option: Option) -> Option:
        if not option.recomputes or draw.random() < 0.4:
            return option
        moved_bytes = draw.randint(1, 20)
        return replace(
            option,
            moved_bytes=moved_bytes,
            saved_bytes=option.saved_bytes - moved_bytes,
            unneeded_bytes=option.unneeded_bytes + moved_bytes,
        )

    blocks = (
        replace(block, options=tuple(map(with_move, block.options))) for block in chain.blocks
    )
    return replace(chain, blocks=tuple(blocks))


@given(chains(), st.integers(0, 10**6))
def test_where_inputs_are_moved_the_assignment_fits_and_beats_what_moves_nothing(chain, seed):
    chain = moving(chain, random.Random(seed))
    tried = every_assignment(chain)
    unmoved = every_assignment(without_moves(chain))
    for budget_bytes in sorted({peak_bytes for peak_bytes, _ in tried if peak_bytes >= 0}):
        found = fastest(chain, budget_bytes)
        least, enough = least_seconds(tried, budget_bytes), least_seconds(unmoved, budget_bytes)
        if found is None:
            assert enough is None
            continue
        assert found.peak_bytes == chain.peak_bytes(found.options) <= budget_bytes
        assert least is not None
        assert least <= found.seconds
        assert enough is None or found.seconds <= enough


def without_moves(chain: Chain) -> Chain:
    blocks = (
        replace(block, options=tuple(o for o in block.options if not o.moved_bytes))
        for block in chain.blocks
    )
    return replace(chain, blocks=tuple(blocks))


@pytest.mark.slow
@given(chains(), st.integers(10**4, 10**6))
def test_large_numbers_make_no_difference(chain, scale):
    large = scaled(chain, scale)
    tried = every_assignment(large)
    for budget_bytes in {peak_bytes for peak_bytes, _ in tried}:
        found = fastest(large, budget_bytes)
        assert found is not None
        assert found.peak_bytes <= budget_bytes
        assert found.seconds == least_seconds(tried, budget_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_long_chains_are_as_fast_as_without_thinning_at_slightly_less_memory(seed):
    """Each of the blocks may cost one part in 512 of the saved bytes."""
    chain = long_chain(seed)
    store_bytes = chain.peak_bytes([block.options[0] for block in chain.blocks])
    for share in (0.9, 0.7, 0.5):
        budget_bytes = int(share * store_bytes)
        found = fastest(chain, budget_bytes)
        assert found is not None
        assert found.peak_bytes <= budget_bytes
        slack_bytes = len(chain.blocks) * budget_bytes // 512
        exact = exact_seconds(chain, budget_bytes)
        assert exact <= found.seconds <= exact_seconds(chain, budget_bytes - slack_bytes)
        assert found.seconds <= 1.02 * exact


@pytest.mark.slow
@given(chains())
def test_the_smallest_assignment_is_the_smallest_of_all(chain):
    assert smallest(chain).peak_bytes == min(
        peak_bytes for peak_bytes, _ in every_assignment(chain)
    )


@pytest.mark.slow
@given(chains(), st.integers(10**4, 10**6))
def test_the_smallest_of_large_numbers_is_within_one_part_in_five_hundred(chain, scale):
    large = scaled(chain, scale)
    least_bytes = min(peak_bytes for peak_bytes, _ in every_assignment(large))
    assert least_bytes <= smallest(large).peak_bytes <= least_bytes * (1 + 1 / 500) + 1


@pytest.mark.slow
@given(chains())
def test_the_frontier_falls_in_bytes_and_rises_in_seconds(chain):
    found = frontier(chain)
    assert found[0].options == tuple(block.options[0] for block in chain.blocks)
    for faster, smaller in itertools.pairwise(found):
        assert smaller.peak_bytes < faster.peak_bytes
        assert smaller.seconds >= faster.seconds
    assert found[-1].peak_bytes == smallest(chain).peak_bytes


@pytest.mark.slow
@given(chains(), st.lists(st.integers(0, 300), max_size=3))
def test_budgets_that_are_named_are_met_exactly(chain, budgets_bytes):
    found = frontier(chain, budgets_bytes=budgets_bytes)
    for budget_bytes in budgets_bytes:
        best = fastest(chain, budget_bytes)
        fitting = [a.seconds for a in found if a.peak_bytes <= budget_bytes]
        assert min(fitting, default=None) == (best and best.seconds)


def test_of_equally_fast_assignments_the_one_that_saves_less_is_taken():
    options = tuple(
        Option(recomputes=n > 0, keep=(), saved_bytes=saved, unneeded_bytes=0, seconds=0.0)
        for n, saved in enumerate((400, 300, 200))
    )
    block = ChainBlock(
        name="0", options=options, forward_bytes=0, backward_bytes=0, recompute_bytes=0, gap_bytes=0
    )
    found = fastest(Chain(blocks=(block,), elsewhere_bytes=0), 10**7)
    assert found is not None
    assert found.options == (options[2],)


def test_a_chain_of_no_blocks_is_what_it_is():
    chain = Chain(blocks=(), elsewhere_bytes=7)
    assert fastest(chain, 6) is None
    assert fastest(chain, 7).options == ()
    assert [assignment.peak_bytes for assignment in frontier(chain)] == [7]


def scaled(chain: Chain, scale: int) -> Chain:
    """Multiply every number of bytes, and make them uneven."""

    def scaled_option(option: Option, odd: int) -> Option:
        return Option(
            recomputes=option.recomputes,
            keep=option.keep,
            saved_bytes=option.saved_bytes * scale + odd,
            unneeded_bytes=option.unneeded_bytes * scale,
            seconds=option.seconds,
            follows_recomputed=option.follows_recomputed,
        )

    return Chain(
        blocks=tuple(
            ChainBlock(
                name=block.name,
                options=tuple(scaled_option(o, 7 * n) for n, o in enumerate(block.options)),
                forward_bytes=block.forward_bytes * scale + 1,
                backward_bytes=block.backward_bytes * scale + 2,
                recompute_bytes=block.recompute_bytes * scale + 3,
                gap_bytes=block.gap_bytes * scale + 4,
            )
            for block in chain.blocks
        ),
        elsewhere_bytes=chain.elsewhere_bytes * scale,
    )


def long_chain(seed: int) -> Chain:
    """Return a chain of so many blocks that space have to be thinned out."""
    draw = random.Random(seed)
    blocks = []
    for number in range(12):
        store_bytes = draw.randint(200, 900)
        sizes = sorted({draw.randint(0, store_bytes) for _ in range(5)}, reverse=True)
        options = tuple(
            Option(
                recomputes=n > 0,
                keep=(),
                saved_bytes=size,
                unneeded_bytes=0,
                seconds=(n and 1.0) * draw.uniform(0.5, 1.5) * (store_bytes - size),
            )
            for n, size in enumerate([store_bytes, *sizes])
        )
        inside = [draw.randint(0, 300) for _ in range(4)]
        blocks.append(
            ChainBlock(
                name=str(number),
                options=options,
                forward_bytes=inside[0],
                backward_bytes=inside[1],
                recompute_bytes=inside[2],
                gap_bytes=inside[3],
            )
        )
    return Chain(blocks=tuple(blocks), elsewhere_bytes=0)


def exact_seconds(chain: Chain, budget_bytes: int) -> float:
    """Find the fewest seconds by the same recursion, with every state kept."""
    fastest_of = {0: 0.0}
    for block in chain.blocks:
        after: dict[int, float] = {}
        for saved_bytes, seconds in fastest_of.items():
            for option in block.options:
                if block.peak_bytes(option, saved_bytes) <= budget_bytes:
                    saved = saved_bytes + option.saved_bytes
                    after[saved] = min(after.get(saved, 1e9), seconds + option.seconds)
        fastest_of = after
    return min(fastest_of.values())
