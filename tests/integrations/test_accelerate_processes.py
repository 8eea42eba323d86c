"""Loops of Accelerate in several processes have the weights of plain PyTorch, or are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.multiprocessing import spawn

pytest.importorskip("accelerate")
from tests.integrations import accelerate_ranks
from tests.runtime import sharded_ranks

from memfit.errors import MemfitError
from memfit.integrations.accelerate import fit

NUM_RANKS = 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "wrapper"), [("ddp", "Distributed"), ("fsdp2", "FSDP")])
def test_processes_end_as_whole_batches_do(tmp_path: Path, kind: str, wrapper: str) -> None:
    """With clipping, pieces, batches of unlike sizes and a Total."""
    spawn(
        accelerate_ranks.trains,
        args=(NUM_RANKS, str(tmp_path / "store"), str(tmp_path), kind),
        nprocs=NUM_RANKS,
    )
    said = {path.stem: path.read_text().split() for path in tmp_path.glob("*.txt")}
    assert len(said) == 3 * NUM_RANKS
    for found in said.values():
        assert found[0].startswith(wrapper)
        assert float(found[1]) <= 1e-12


@pytest.mark.slow
def test_what_is_not_there_is_refused_in_every_process(tmp_path: Path) -> None:
    spawn(
        accelerate_ranks.is_refused,
        args=(NUM_RANKS, str(tmp_path / "store"), str(tmp_path)),
        nprocs=NUM_RANKS,
    )
    for rank in range(NUM_RANKS):
        said = (tmp_path / f"said-{rank}.txt").read_text().splitlines()
        fragments = ("a model that is sharded already cannot", "Set 2", "No plan fits the budget")
        assert len(said) == len(fragments)
        for line, fragment in zip(said, fragments, strict=True):
            assert fragment in line


@pytest.mark.parametrize(
    ("kind", "fragment"),
    [
        ("DEEPSPEED", "memfit.integrations.deepspeed runs one exactly"),
        ("FSDP", "fsdp_version is 1"),
        ("MEGATRON_LM", "under MEGATRON_LM an engine of its own steps"),
        ("MULTI_XPU", "under MULTI_XPU"),
    ],
)
def test_engines_are_refused_with_what_there_is_instead(kind: str, fragment: str) -> None:
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    accelerator: Any = SimpleNamespace(distributed_type=SimpleNamespace(name=kind), state=state)
    with pytest.raises(MemfitError, match=fragment):
        fit(accelerator, sharded_ranks.model(), None, sharded_ranks.mean, sharded_ranks.rows(4))
