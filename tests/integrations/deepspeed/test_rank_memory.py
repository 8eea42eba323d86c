"""What a rank takes under ZeRO is counted from a recorded step, term by term."""

from __future__ import annotations

import pytest
from tests.integrations.deepspeed import engine_ranks

from memfit.integrations.deepspeed import RankMemory, ZeroChoice, predict_rank

ELEMENTS = 3 * (15 * 47 + 47 + 47 * 15 + 15) + 15 * 5 + 5
WEIGHT_BYTES = 4 * ELEMENTS


def found(num_ranks: int = 2, **options: object) -> tuple[RankMemory, dict[str, int]]:
    job = engine_ranks.job_of(engine_ranks.mean, 8)
    choice = ZeroChoice(reduce_bucket_elements=100, **options)  # type: ignore[arg-type]
    memory = predict_rank(job, choice, num_ranks=num_ranks)
    return memory, {term.name: term.num_bytes for term in memory.terms}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_states_are_shared_and_weights_from_stage_3_on(num_ranks: int) -> None:
    shard = 4 * -(-ELEMENTS // num_ranks)
    for stage, weight_bytes in ((1, WEIGHT_BYTES), (2, WEIGHT_BYTES), (3, shard)):
        memory, terms = found(num_ranks, stage=stage, persistence_elements=0)
        assert terms["weights"] == pytest.approx(weight_bytes, abs=4)
        assert terms["fp32 weights"] == shard
        assert terms["states"] == pytest.approx(2 * shard, rel=0.01)
        assert memory.peak_bytes == sum(terms.values())
        assert memory.interval.low_bytes <= memory.peak_bytes <= memory.interval.high_bytes


def test_what_is_on_the_host_is_counted_where_the_host_is_the_device() -> None:
    memory, terms = found(stage=2, offload_optimizer="cpu")
    assert memory.host_bytes == 0
    assert terms["fp32 weights on the host"] == 4 * -(-ELEMENTS // 2)
    assert "fp32 weights" not in terms


@pytest.mark.slow
def test_the_bucket_is_counted_whole_and_small_weights_stay() -> None:
    _, terms = found(stage=3)
    assert terms["reduce bucket"] == 400
    assert terms["weights"] == WEIGHT_BYTES + WEIGHT_BYTES // 2
