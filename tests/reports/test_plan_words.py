"""Every strategy says in words what it does."""

from __future__ import annotations

import pytest

from memfit.reports.plan_words import WORDS, plan_in_words
from memfit.strategies import CATALOGUE


def test_every_strategy_has_words() -> None:
    assert set(WORDS) == {strategy.name for strategy in CATALOGUE}


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("micro-batching(16)", "run the batch in pieces of 16"),
        ("bf16(keep=head)", "compute forward and loss in bf16, but for head"),
        ("bf16(keep=a b c)", "compute forward and loss in bf16, but for 3 modules"),
        ("activation-checkpointing", "compute blocks again in backward"),
        (
            "activation-checkpointing(blocks=h.0 h.1 h.2, keep=mm.0 add.0)",
            "compute 3 modules again in backward, but for 2 results",
        ),
        ("activation-offload(disk)", "keep what blocks save on the disk until backward"),
        (
            "optimizer-offload(to=disk, min_tensor_bytes=1)",
            "keep the optimizer's states on the disk",
        ),
        ("tiling(num_tiles=4, blocks=a.mlp)", "compute a.mlp in 4 tiles, and again in backward"),
        ("somebody-elses(3)", "somebody-elses(3)"),
        ("micro-batching", "micro-batching"),
        ("a b (c", "a b (c"),
    ],
)
def test_a_label_is_put_in_words(label: str, words: str) -> None:
    assert [said for said, _ in plan_in_words([label])] == [words]


def test_settings_of_one_strategy_are_one_line() -> None:
    labels = ["activation-checkpointing(h.0)", "micro-batching(4)", "activation-checkpointing(h.1)"]
    assert plan_in_words(labels) == [
        ("compute blocks again in backward, in 2 ways", "activation-checkpointing"),
        ("run the batch in pieces of 4", "micro-batching"),
    ]
