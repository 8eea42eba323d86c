"""Strategies on models that ranks share train as whole batches do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.runtime import shard_strategies
from tests.runtime.shard_strategies import CASES, IN_16_BITS, SHARED
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn

from memfit.errors import StrategyError
from memfit.runtime.shards.refusals import refuse_what_does_not_go_with_shards
from memfit.session.gathered import KeptGathered, has_shards
from memfit.strategies import CATALOGUE, Fsdp2, build_strategy
from memfit.strategies.linear_cross_entropy.deferred_logits import DeferredLogits, deferred_logits

_KINDS = {
    "moved": ["moved", "moved in pieces", "moved and recomputed"],
    "fused": ["fused", "fused in pieces", "tiled", "tiled in pieces"],
    "loss": ["streamed", "streamed in pieces", "head", "head in pieces"],
    "all": ["all"],
}


def _found(folder: Path) -> dict[str, float]:
    return {path.stem: float(path.read_text()) for path in folder.glob("*.txt")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_ranks_train_as_whole_batches_do(tmp_path: Path, kind: str) -> None:
    """With clipping, uneven batches, means and totals, under ddp and both ways of fsdp2."""
    names = _KINDS[kind]
    arguments = (2, str(tmp_path / "store"), str(tmp_path), names)
    spawn(shard_strategies.trains, args=arguments, nprocs=2)
    found = _found(tmp_path)
    assert len(found) == 2 * len(SHARED) * sum(len(CASES[name].jobs) for name in names)
    assert max(found.values()) <= 1e-12, found


@pytest.mark.slow
def test_ranks_train_in_16_bits_as_one_process_does_on_their_parts(tmp_path: Path) -> None:
    """To float32's rounding where ranks have as many samples; else parts are scaled otherwise.

    A part's gradient is rounded to 16 bits: 2^-8 of a norm of 0.05, three steps of 0.5 long.
    """
    arguments = (2, str(tmp_path / "store"), str(tmp_path))
    spawn(shard_strategies.trains_in_16_bits, args=arguments, nprocs=2)
    found = _found(tmp_path)
    assert len(found) == 2 * 2 * 2 * len(IN_16_BITS)
    assert max(each for name, each in found.items() if ", even" in name) <= 1e-6, found
    assert max(found.values()) <= 1e-3, found


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_changes_nothing(tmp_path: Path) -> None:
    """The step is undone on both ranks, and run again under the same strategies: equal bits."""
    numbers = [*range(3)]
    arguments = (2, str(tmp_path / "store"), str(tmp_path), numbers)
    spawn(shard_strategies.fails_and_goes_on, args=arguments, nprocs=2)
    for rank in range(2):
        lines = (tmp_path / f"faults-{rank}.jsonl").read_text().splitlines()
        rows = [*map(json.loads, lines)]
        assert len(rows) == len(numbers) * len(shard_strategies.FAILING)
        assert all(row["difference"] == 0.0 for row in rows), rows
        phases = [phase for row in rows for phase in row["phases"]]
        assert {*phases} >= {"forward", "backward", "optimizer"}, rows


@pytest.mark.slow
def test_strategies_change_little_where_blocks_are_gathered_in_16_bits(tmp_path: Path) -> None:
    """What moves bytes changes none; the others round elsewhere: a loss in bfloat16 by 2^-8."""
    arguments = (2, str(tmp_path / "store"), str(tmp_path))
    spawn(shard_strategies.trains_gathered_in_16_bits, args=arguments, nprocs=2)
    found = _found(tmp_path)
    assert len(found) == 2 * len(shard_strategies.IN_LOW_BITS)
    assert found["moved-0"] == found["moved-1"] == 0.0
    assert max(found.values()) <= 2**-7, found


@pytest.mark.slow
def test_models_that_users_have_sharded_train_as_whole_batches_do(tmp_path: Path) -> None:
    """As torch shards by default, and with a head that is gathered and given back on its own."""
    arguments = (2, str(tmp_path / "store"), str(tmp_path))
    spawn(shard_strategies.trains_own_shards, args=arguments, nprocs=2)
    found = _found(tmp_path)
    assert len(found) == 2 * len(shard_strategies.OWN)
    assert max(found.values()) <= 1e-12, found


@pytest.mark.slow
def test_logits_of_a_weight_that_was_given_back_are_refused(tmp_path: Path) -> None:
    arguments = (2, str(tmp_path / "store"), str(tmp_path))
    spawn(shard_strategies.uses_logits_late, args=arguments, nprocs=2)
    for rank in range(2):
        assert "after the loss was computed" in (tmp_path / f"said-{rank}.txt").read_text()


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only rank of a group, which gathers and gives back all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _gradients(model: nn.Module, labels: torch.Tensor, logits: torch.Tensor) -> list[torch.Tensor]:
    F.cross_entropy(logits, labels).backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_the_weight_that_makes_logits_is_kept_until_the_loss_is_computed() -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(6, 8), torch.randint(0, 1100, (6,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1100, bias=False)).double()
    wanted = _gradients(model, labels, model(inputs.double()))
    fully_shard(model, reshard_after_forward=True)
    model.zero_grad()
    gathered = KeptGathered(model)
    with deferred_logits(4, gathered):
        model(inputs.double())  # the first pass makes the memory that later ones use
        logits = model(inputs.double())
        assert type(logits) is DeferredLogits
        found = _gradients(model, labels, logits)
    gathered.undo()
    assert has_shards(model)
    assert max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) <= 1e-14
    with pytest.raises(StrategyError, match="after the loss was computed"):
        logits.sum()


def test_what_ranks_may_not_do_with_shards_is_said_why() -> None:
    refused = {kind.name: Fsdp2().refuses(kind) for kind in CATALOGUE}
    refused = {name: said for name, said in refused.items() if said}
    assert refused.keys() >= {"cached-gradients", "optimizer-in-backward", "eight-bit-optimizer"}
    assert not refused.keys() & {"activation-offload", "bf16", "fp16", "linear-cross-entropy"}
    assert not any("not shown to keep" in each for each in refused.values()), refused
    with pytest.raises(StrategyError, match=r"cached-gradients.* runs parts of the model apart"):
        refuse_what_does_not_go_with_shards(
            [build_strategy("cached-gradients", {"micro_batch_size": 2})]
        )
