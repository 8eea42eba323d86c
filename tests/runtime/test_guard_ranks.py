"""Ranks that train together all go on alike, wherever one of them runs out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime import guard_ranks
from torch.multiprocessing import spawn

from memfit.errors import OtherRankError
from memfit.runtime.guard.ranks import JoinedRanks


@pytest.mark.slow
def test_when_one_rank_fails_all_end_as_if_none_had(tmp_path: Path) -> None:
    """Every fault is in one of two ranks; both are compared with an undisturbed run, bit by bit."""
    arguments = (2, str(tmp_path / "store"), 6, str(tmp_path))
    spawn(guard_ranks.fails_in_every_kind, args=arguments, nprocs=2)
    names = [f"{kind}-{rank}" for kind in guard_ranks.KINDS for rank in range(2)]
    found = {name: (tmp_path / f"{name}.txt").read_text() for name in names}
    assert found == dict.fromkeys(names, "fine")


@pytest.mark.slow
def test_errors_of_another_kind_and_death_stop_the_other_rank_with_a_message(
    tmp_path: Path,
) -> None:
    arguments = (2, str(tmp_path / "store"), str(tmp_path))
    spawn(guard_ranks.fails_otherwise, args=arguments, nprocs=2)
    first, second = [(tmp_path / f"error-{rank}.txt").read_text() for rank in range(2)]
    assert "OtherRankError: Another rank has failed: rank 1 raised an error" in first
    assert first.count("OtherRankError") == 2, "once for the error, once for the death"
    assert "shapes cannot be multiplied" in second


@pytest.mark.slow
def test_a_rank_that_is_gone_before_the_run_starts_is_named(tmp_path: Path) -> None:
    arguments = (2, str(tmp_path / "store"), str(tmp_path))
    spawn(guard_ranks.is_gone_before_the_start, args=arguments, nprocs=2)
    name, seconds = (tmp_path / "said.txt").read_text().split()
    assert name == "OtherRankError"
    assert int(seconds) < guard_ranks.MOST_SECONDS


def test_a_rank_that_was_lost_is_named_however_often_the_others_are_asked(tmp_path: Path) -> None:
    """After the exchange that it was lost in, the step tells of its error in another one."""

    class Gone:
        def allreduce(self, _tensors: object) -> None:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")

    with guard_ranks.joined(0, 1, str(tmp_path / "store")):
        ranks = JoinedRanks()
        ranks._group = Gone()
        for _ in range(2):
            with pytest.raises(OtherRankError, match="Connection closed by peer"):
                ranks.exchange(1)
