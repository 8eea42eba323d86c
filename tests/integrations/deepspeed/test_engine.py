"""Steps under an engine of DeepSpeed end as the whole batch does, whatever the stage."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrations.deepspeed import engine_ranks
from torch.multiprocessing import spawn

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install memfit[deepspeed]")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ("0", "1", "1 cpu", "2", "2 cpu")),
        (2, ("3", "3 kept", "3 cpu")),
        (4, ("0", "1", "2", "2 cpu")),
        (4, ("3", "3 cpu")),
    ],
)
def test_engines_end_as_whole_batches_do(
    tmp_path: Path, num_ranks: int, names: tuple[str, ...]
) -> None:
    """With clipping, pieces, uneven ranks, a Total, recomputed blocks and a falling rate."""
    spawn(
        engine_ranks.trains,
        args=(num_ranks, str(tmp_path / "store"), str(tmp_path), names),
        nprocs=num_ranks,
    )
    found = {path.stem: float(path.read_text()) for path in tmp_path.glob("*.txt")}
    assert len(found) == len(names) * 3 * num_ranks
    assert max(found.values()) <= 1e-6, found


def test_what_is_not_exact_is_refused_on_every_rank(tmp_path: Path) -> None:
    spawn(engine_ranks.is_refused, args=(2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    for rank in range(2):
        said = (tmp_path / f"said-{rank}.txt").read_text().splitlines()
        fragments = (
            "is wider than fp32",
            "the model is sharded or wrapped already",
            "batch normalisation",
            "in stage 3 that are the weights themselves",
            "has another size than micro_batch_size, 2",
            "Both a choice and a config were given",
            "a rank needs 4 passes, and another has 2 sample(s)",
            "batch[1] holds -100 once" if rank == 0 else "its batch cannot be cut exactly",
        )
        assert len(said) == len(fragments), said
        for line, fragment in zip(said, fragments, strict=True):
            assert fragment in line


def test_unusual_models_and_losses_end_as_the_whole_batch(tmp_path: Path) -> None:
    spawn(engine_ranks.trains_unusual, args=(2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    found = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    assert len(found) == len(engine_ranks.UNUSUAL) * 2 * 2
    refused = {
        "idle-2": "0.weight, 0.bias took no part in the step",
        "idle-3": "0.weight, 0.bias took no part in the step",
        "of parts-3": "it calls inner by itself",
        "of weights-3": "invalid gradient at index 0",
    }
    for name, text in found.items():
        reason = refused.get(name.rpartition("-")[0])
        assert reason in text if reason else float(text) <= 1e-6, found


def test_models_that_are_there_end_as_the_whole_batch(tmp_path: Path) -> None:
    spawn(engine_ranks.trains_living, args=(2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    found = {path.stem: float(path.read_text()) for path in tmp_path.glob("*.txt")}
    assert len(found) == 3 * 2
    assert max(found.values()) <= 1e-6, found
