"""Rows of several ranks and of adapters are read, and rebuilt by the code of their source."""

from __future__ import annotations

import json
from itertools import chain

import pytest
import torch
from accuracy.packages import CannotRebuild
from accuracy.published.litgpt import _adapters
from accuracy.published.packed_linear import PackedLinear
from accuracy.published.reading import card_name
from accuracy.rebuild import rebuild
from accuracy.results import as_json
from accuracy.rows import parse_row
from accuracy.scoring import predict_row, settings_of, torch_version_of
from accuracy.stored import stored_scores
from results_file import load_result
from tests.accuracy.test_rebuild import ROWS, ROWS_FOLDER, rows

pytestmark = pytest.mark.filterwarnings("default")  # FSDP1 and optional packages warn

FILES = (
    *("fms_acceleration", "fsdp_qlora", "lightning_docs", "lightning_thunder", "litgpt"),
    *("peft_method_comparison", "torchao", "torchtitan", "torchtune"),
)
PUBLISHED = {row.id: row for name in FILES for row in rows.read_rows(ROWS_FOLDER / f"{name}.jsonl")}
TINY = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256}


def small(identifier: str, **changes):
    """Return a row with a small model in the place of its own."""
    fields = dict(PUBLISHED[identifier].published)
    fields |= {"model": fields["model"] | TINY, "sequence": 64} | changes
    return parse_row(fields)


def test_every_row_names_a_card_and_is_rebuilt_or_refused_with_a_reason():
    reasons = set()
    for row in PUBLISHED.values():
        assert row.device is not None, row.id
        try:
            assert rebuild(row).num_steps > 0
        except CannotRebuild as error:
            reasons.add(str(error).partition("(")[0])
    assert len(reasons) < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "identifier", ["titan-822-default-steady", "titan-debug-1d-steady", "litgpt-rt-35"]
)
def test_a_rank_of_more_ranks_takes_less(identifier):
    two, eight = (
        predict_row(small(identifier, ranks=ranks)).allocated.likely_bytes for ranks in (2, 8)
    )
    assert eight < two


@pytest.mark.slow
def test_adapters_on_packed_weights_take_less_than_on_whole_ones():
    shape = TINY | {"kv_heads": 4, "hidden": 512, "ffn": 2048}
    changes = {"model": PUBLISHED["litgpt-rt-00"].published["model"] | shape}
    whole = predict_row(small("litgpt-rt-00", **changes)).allocated.likely_bytes
    packed = predict_row(small("litgpt-rt-02", **changes)).allocated.likely_bytes
    assert packed < whole


def test_what_a_row_leaves_out_is_taken_from_its_project():
    early, late = PUBLISHED["titan-165-fsdp2-ac-active"], PUBLISHED["titan-822-default-step1"]
    assert torch_version_of(early) == (2, 4)
    assert torch_version_of(late) == (2, 7)
    assert not settings_of(early).expandable_segments
    assert settings_of(late).expandable_segments


def test_places_of_adapters_are_read():
    spelt = "LoRA {'r': '8', 'alpha': '16', 'dropout': '0.05', 'key': 'true', 'head': 'true'}"
    found = _adapters(spelt)
    assert (found.rank, found.key, found.head, found.query) == (8, True, True, False)
    early = _adapters("LoRA r=8 alpha=16 dropout=0.05 on query and value")
    assert (early.query, early.key, early.value) == (True, False, True)
    assert _adapters("full fine-tuning").rank == 0


def test_cards_are_told_by_what_their_names_have():
    assert card_name("NVIDIA A100-SXM4-40GB") == "a100-40gb"
    assert card_name("NVIDIA PG509-210 (A100 80GB)") == "a100-80gb"
    assert card_name("Abacus") is None


@pytest.mark.parametrize("keeps_input", [True, False])
def test_a_packed_layer_gives_its_input_a_gradient(keeps_input):
    layer = PackedLinear(8, 4, True, is_nested=True, keeps_input=keeps_input)
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_scores_are_read_back_as_they_were_stored():
    content = load_result("accuracy_gpu")
    recorded = [rows.read_rows(path) for path in sorted(ROWS_FOLDER.glob("recorded_*.jsonl"))]
    known = {row.id: row for row in chain(ROWS, *recorded)}
    found = tuple(stored_scores(content, {**known, **PUBLISHED}))
    again = as_json(found)
    for name in ("rows", "summaries", "overall", "verdicts"):
        assert json.loads(json.dumps(again[name])) == content[name]
