"""Rows of several ranks and of adapters are read, and rebuilt by the code of their source."""

from __future__ import annotations

import json
import weakref
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accuracy.metrics import Answer, score_all
from accuracy.packages import CannotRebuild
from accuracy.published.litgpt import _adapters, _step
from accuracy.published.packed_linear import PackedLinear
from accuracy.published.reading import card_name
from accuracy.published.trainer import _InPlaceCrossEntropy, loss_and_logits
from accuracy.rebuild import rebuild
from accuracy.results import as_json
from accuracy.rows import parse_row
from accuracy.scoring import Predicted, _ends, predict_row, settings_of, torch_version_of
from accuracy.stored import stored_scores
from results_file import load_result
from tests.accuracy.test_rebuild import ROWS, ROWS_FOLDER, rows
from torch import nn

from memfit.prediction.peak_range import PeakRange

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


@pytest.mark.parametrize(
    ("identifier", "num_readings"),
    [
        ("litgpt-rt-01", 0),  # the longest sample comes once
        ("litgpt-hub-39", 1),  # two micro-batches in a row may be as long as can be
        ("litgpt-hub-42", 3),  # full fine-tuning: without an update, after one, gradients summed up
        ("fms-a100_80gb-068", 0),
    ],
)
def test_what_a_description_leaves_open_is_read_in_each_way(identifier, num_readings):
    assert len(rebuild(PUBLISHED[identifier]).readings) == num_readings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("identifier", "is_wide_below"), [("litgpt-hub-42", True), ("litgpt-hub-41", False)]
)
def test_an_interval_spans_the_readings(identifier, is_wide_below):
    wide = PUBLISHED[identifier].published["model"] | TINY | {"hidden": 512, "ffn": 2048}
    found = predict_row(small(identifier, model=wide, sequence=32)).allocated
    assert (found.low_bytes < 0.9 * found.likely_bytes) == is_wide_below
    assert found.high_bytes > found.likely_bytes


def test_another_reading_may_be_as_far_off_as_the_likely_one():
    peak = PeakRange(likely_bytes=1000, low_bytes=900, high_bytes=1100, is_shared=True)
    assert _ends(peak, 2000, "allocated") == (1840, 2160)


@pytest.mark.parametrize(("task", "is_bound"), [("QLoRA", True), ("full pre-training", False)])
def test_a_script_of_fine_tuning_binds_logits_until_the_model_has_returned_again(task, is_bound):
    weight = torch.ones(8, requires_grad=True)
    earlier, were_alive = [], []

    def model(tokens, _chunk):
        were_alive.extend(reference() is not None for reference in earlier)
        logits = weight.expand(*tokens.shape, 8) * 2
        earlier.append(weakref.ref(logits))
        return logits

    fields = {"task": task, "loss": "chunk_size=0", "grad_accum": None, "ranks": 1}
    _step(fields, model, None, [torch.zeros(2, 4, dtype=torch.int64)] * 2)()
    assert were_alive == [is_bound]


class Layers(nn.Module):
    """Two layers with a fused projection each, under the names that GPTBigCode gives them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(16, 8), nn.Linear(8, 16)
        attention = (nn.ModuleDict({"c_attn": nn.Linear(8, 12)}) for _ in range(2))
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": each}) for each in attention)
        self.config = None

    def base_model(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer["attn"]["c_attn"](x)[..., :8]
        return SimpleNamespace(last_hidden_state=x)


def test_a_cache_that_is_filled_while_checkpointing_keeps_the_queries_too():
    model, ids = Layers(), torch.randint(0, 16, (2, 5))
    loss, (logits, cache) = loss_and_logits(model, ids, upcasts=False)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.equal(loss, expected)
    assert [each.shape for each in cache] == [(2, 5, 12)] * 2
    model.base_model(ids)
    assert len(cache) == 2, "what is computed again for the backward pass is not kept"


def test_the_fast_loss_writes_gradients_over_logits():
    logits = torch.randn(5, 16, requires_grad=True) * 1
    places = []
    logits.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    _InPlaceCrossEntropy.apply(logits, torch.zeros(5, dtype=torch.int64)).backward()
    assert places == [logits.data_ptr()]


def test_process_bytes_of_a_published_row_are_what_anybody_is_told():
    row = PUBLISHED["fms-a100_80gb-001"]
    peak = PeakRange(likely_bytes=2**30, low_bytes=2**30, high_bytes=2**30, is_shared=True)
    predicted = Predicted(
        device="a100-80gb",
        allocated=peak,
        reserved=peak,
        smallest_bytes=None,
        context_bytes=0,
        card_bytes=80 * 2**30,
        seconds=0.0,
        notes=(),
    )
    (score,) = score_all([Answer(row=row, predicted=predicted)])
    assert score.context_bytes == (450 + 544) * 2**20
    process = score.figures["process"].interval
    assert process.high_bytes >= (1024 + 450 + 1600) * 2**20, "NCCL may take as much"
