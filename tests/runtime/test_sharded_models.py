"""Models whose ranks exchange shards train as the whole batch does, or are refused on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime import sharded_ranks
from torch.multiprocessing import spawn

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_end_as_whole_batches_do(tmp_path: Path, num_ranks: int) -> None:
    """With clipping, pieces, batches of other sizes on other ranks, and a Total."""
    spawn(
        sharded_ranks.trains,
        args=(num_ranks, str(tmp_path / "store"), str(tmp_path)),
        nprocs=num_ranks,
    )
    found = {path.stem: float(path.read_text()) for path in tmp_path.glob("*.txt")}
    assert len(found) == len(sharded_ranks.PLANS) * 2 * num_ranks
    assert max(found.values()) <= 1e-12, found


def test_a_plan_is_attached_to_a_sharded_model(tmp_path: Path) -> None:
    """With clipping and batches of other sizes on other ranks, in a loop of the user's own."""
    spawn(sharded_ranks.attaches, args=(2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    found = [float(path.read_text()) for path in tmp_path.glob("attached-*.txt")]
    assert len(found) == 2
    assert max(found) <= 1e-12


def test_replicas_with_states_on_disk_end_as_whole_batches_do(tmp_path: Path) -> None:
    """With clipping, pieces, a falling rate, uneven batches and a Total."""
    spawn(
        sharded_ranks.trains_replicated,
        args=(2, str(tmp_path / "store"), str(tmp_path)),
        nprocs=2,
    )
    found = {path.stem: float(path.read_text()) for path in tmp_path.glob("*.txt")}
    assert len(found) == 4
    assert max(found.values()) <= 1e-12, found


def test_what_would_wait_for_ever_or_count_twice_is_refused_on_every_rank(tmp_path: Path) -> None:
    spawn(sharded_ranks.is_refused, args=(2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    for rank in range(2):
        said = (tmp_path / f"said-{rank}.txt").read_text().splitlines()
        fragments = (
            "cached-gradients(2) of the plan does not go with that: it runs parts of the model apart",
            "average_gradients does so again",
            "eight-bit-optimizer of the plan does not go with that: bitsandbytes updates plain",
            "a rank needs 3 passes, and another has 2 sample(s)",
        )
        assert len(said) == len(fragments)
        for line, fragment in zip(said, fragments, strict=True):
            assert fragment in line
