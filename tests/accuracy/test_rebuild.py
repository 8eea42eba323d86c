"""Rows of published measurements are read, rebuilt, and run with the authors' lifetimes."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accuracy import (
    attention,
    configurations,
    losses,
    models,
    optimizers,
    packages,
    protocols,
    quantized,
    rows,
)
from accuracy import rebuild as rebuilding
from torch import nn

from memfit.errors import DataError
from memfit.virtual.tensors import virtual_tensors

pytestmark = pytest.mark.filterwarnings("default")  # optional packages warn of their own future

ROWS_FOLDER = Path(rows.__file__).with_name("rows")
FILES = {"torch_preflight": 4, "fitcheck": 40, "xmem": 6}
ROWS = [row for name in FILES for row in rows.read_rows(ROWS_FOLDER / f"{name}.jsonl")]
CUSTOM = {
    "id": "tiny",
    "source": "somewhere",
    "precision": "fp32",
    "model": "mlp",
    "model_library": "custom",
    "constructor": {"layers": [["Linear", 8, 16], ["ReLU"], ["Dropout", 0.1], ["Linear", 16, 3]]},
    "input": [
        {"name": "x", "shape": [4, 8], "dtype": "float32"},
        {"name": "target", "shape": [4], "dtype": "int64"},
    ],
    "optimizer": "torch.optim.AdamW",
    "optimizer_kwargs": {"lr": 0.01},
    "loss": "cross_entropy(model(x), target)",
    "zero_grad": "start_of_step, set_to_none=True",
    "steps": {"warmup": 1, "measured": 2},
    "measured": {"allocated_bytes": 1},
}
TINY_GPT2 = CUSTOM | {
    "model": "gpt2",
    "model_library": "transformers",
    "constructor": {"call": "AutoModelForCausalLM.from_pretrained('gpt2')"},
    "model_config": {"num_layers": 2, "hidden_size": 16, "n_head": 2, "vocab_size": 50},
    "input": [
        {"name": "input_ids", "shape": [2, "<=6"], "dtype": "int64"},
        {"name": "labels", "same_tensor_as": "input_ids"},
    ],
    "loss": "model(input_ids=ids, labels=ids).loss; no attention mask",
}
TINY_LLAMA = TINY_GPT2 | {
    "model": "meta-llama/Llama-3.2-1B",
    "precision": "fp16",
    "precision_detail": {"load_dtype": "float16"},
    "constructor": {"moved_with": "device_map", "use_cache": False},
    "model_config": {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 64,
    },
    "lora": {"r": 2, "alpha": 4, "dropout": 0.0, "targets": ["q_proj", "v_proj"]},
    "quantization": {"type": "nf4", "compute_dtype": "float16", "block_size": 64},
    "gradient_checkpointing": {"enabled": True, "use_reentrant": False},
}


def row_of(fields, **changes):
    return rows.parse_row(fields | changes)


def needs(*names: str) -> None:
    for name in names:
        try:
            packages.load_package(name)
        except packages.CannotRebuild:
            pytest.skip(f"{name} is not installed")


def needs_for(row) -> None:
    if row.model_library != "custom":
        needs(row.model_library)
    if row.lora is not None:
        needs("peft")
    if row.quantization is not None:
        needs("bitsandbytes")


# --- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_repository_is_read_whole(name):
    assert len(rows.read_rows(ROWS_FOLDER / f"{name}.jsonl")) == FILES[name]


def test_a_bound_on_a_dimension_is_read_as_the_bound():
    (row,) = (row for row in ROWS if row.model == "distilbert/distilgpt2")
    assert row.inputs[0].shape == (10, 128)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "no JSON"),
        ("[1]", "JSON object"),
        ('{"id": "a"}', "needs source"),
        (json.dumps(CUSTOM | {"precision": "int8"}), "precision is 'int8'"),
        (json.dumps(CUSTOM | {"input": [{"name": "x", "shape": [-1]}]}), "dimension of input x"),
        (json.dumps(CUSTOM | {"measured": {"reserved_bytes": "1 GiB"}}), "measured.reserved_bytes"),
        (json.dumps(CUSTOM | {"steps": {"measured": 0}}), "steps.measured"),
        (json.dumps(CUSTOM | {"constructor": "resnet50()"}), "constructor"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(tmp_path, line, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(CUSTOM)}\n\n{line}\n")

    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: ") as caught:
        rows.read_rows(path)
    assert words in str(caught.value)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl"):
        rows.read_rows(tmp_path / "none.jsonl")


# --- rows of the repository ------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_row_of_the_repository_is_rebuilt(row):
    needs_for(row)
    rebuilt = rebuilding.rebuild(row, "cpu")

    assert rebuilt.num_steps == row.num_warmup_steps + row.num_measured_steps
    assert rebuilt.measured_from_step == (0 if row.source == "xMem" else 1)
    assert len(rebuilt.prelude) == (row.source == "torch-preflight")


COUNTED = {(row.model, str(row.lora)): row for row in ROWS if row.params_total}


@pytest.mark.slow
@pytest.mark.parametrize("row", COUNTED.values(), ids=lambda row: row.id)
def test_a_model_has_as_many_parameters_as_the_authors_counted(row):
    needs_for(row)
    assert models.count_parameters(row) == (row.params_total, row.params_trainable)


@pytest.mark.parametrize(
    "row",
    {row.model: row for row in ROWS if "num_params" in row.model_config}.values(),
    ids=lambda row: row.model,
)
def test_a_base_model_has_as_many_parameters_as_its_summary_says(row):
    needs("transformers")
    base = replace(row, lora=None)
    assert models.count_parameters(base)[0] == row.model_config["num_params"]


@pytest.mark.slow
def test_published_configurations_have_their_published_numbers_of_parameters():
    needs("transformers")
    found, expected = {}, {}
    for name, model in configurations.published().items():
        row = row_of(TINY_GPT2, model=f"owner/{name}", model_config=None, constructor=None)
        found[name] = models.count_parameters(row)[0]
        expected[name] = model.num_params
    assert found == expected


# Where the allocator left no block unsplit, what it counts is the sum of the rounded tensors.
SPLIT = ("sweep-2026-09-15-06", "sweep-2026-09-15-17", "sweep-2026-09-15-18", "cb26baa4af47")


@pytest.mark.slow
@pytest.mark.parametrize("end", SPLIT)
def test_bytes_after_loading_equal_the_measured_ones(end):
    (row,) = (row for row in ROWS if row.id.endswith(end))
    needs_for(row)
    with virtual_tensors():
        model = models.build_model(row, "cpu")
    tensors = [*model.parameters(), *model.buffers()]
    states = [each.quant_state for each in tensors if hasattr(each, "quant_state")]
    tensors += [each for state in states for each in (state.absmax, state.code)]

    loaded_bytes = sum(-(each.nbytes // -512) * 512 for each in tensors)
    packed_bytes = sum(each.nbytes for each in tensors if each.dtype == torch.uint8)
    assert loaded_bytes == row.measured_extra["allocated_after_load_bytes"]
    assert packed_bytes == row.measured_extra["weight_breakdown_bytes"]["nf4_packed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "preflight-0",
        "preflight-6",
        "X400MF_Adam_382_1_5c44",
        "10-4aee",
        pytest.param("sweep-2026-09-15-18", marks=pytest.mark.slow),
    ],
)
def test_a_step_runs_on_fake_tensors(end):
    (row,) = (row for row in ROWS if row.id.endswith(end))
    needs_for(row)
    rebuilt = rebuilding.rebuild(row, "cpu")
    with virtual_tensors():
        for happened_before in rebuilt.prelude:
            happened_before()
        step = rebuilt.setup()
        step()
        step()


# --- small rows, run for real ----------------------------------------------------------------


def parts_of(row):
    """Set a row up on the CPU and give the step with the model and optimizer inside it."""
    made = {}
    usual = rebuilding.make_step

    def remember(row, protocol, parts):
        made["parts"] = parts
        return usual(row, protocol, parts)

    rebuilding.make_step = remember
    try:
        step = rebuilding.rebuild(row, "cpu").setup()
    finally:
        rebuilding.make_step = usual
    return step, made["parts"]


def test_a_custom_row_trains_on_the_cpu():
    torch.manual_seed(0)
    step, parts = parts_of(row_of(CUSTOM))
    before = parts.model[0].weight.detach().clone()
    step()

    assert [type(each).__name__ for each in parts.model] == ["Linear", "ReLU", "Dropout", "Linear"]
    assert parts.model[2].p == 0.1
    assert not torch.equal(before, parts.model[0].weight)
    assert parts.model[0].weight.grad is not None


@pytest.mark.parametrize(
    ("zero_grad", "has_gradients"),
    [("start_of_step", True), ("before_backward", True), ("end_of_step", False)],
)
def test_gradients_are_dropped_where_the_row_says(zero_grad, has_gradients):
    step, parts = parts_of(row_of(CUSTOM, zero_grad=zero_grad))
    step()
    first = parts.model[0].weight.grad
    assert (first is not None) == has_gradients


def test_gradients_add_up_where_nothing_drops_them():
    row = row_of(CUSTOM, zero_grad="never", optimizer="torch.optim.SGD")
    row = replace(row, optimizer_kwargs={"lr": 0.0}, constructor={"layers": [["Linear", 8, 3]]})
    step, parts = parts_of(row)
    step()
    once = parts.model[0].weight.grad.clone()
    step()
    assert torch.allclose(parts.model[0].weight.grad, 2 * once)


@pytest.mark.slow
@pytest.mark.parametrize(("notes", "is_alive"), [(["the output stays alive"], True), ([], False)])
def test_the_output_lives_through_the_update_if_the_row_says_so(notes, is_alive):
    step, parts = parts_of(row_of(CUSTOM, notes=notes))
    outputs, alive = [], []
    parts.model.register_forward_hook(lambda *args: outputs.append(weakref.ref(args[-1])))

    def look(*_args):
        gc.collect()
        alive.append(outputs[-1]() is not None)

    parts.optimizer.register_step_post_hook(look)
    step()
    assert alive == [is_alive]


@pytest.mark.slow
def test_outputs_of_a_loop_live_until_the_next_step_binds_new_ones():
    step, parts = parts_of(row_of(CUSTOM, source="xMem"))
    outputs = []
    parts.model.register_forward_hook(lambda *args: outputs.append(weakref.ref(args[-1])))
    step()
    gc.collect()
    assert outputs[0]() is not None
    step()
    gc.collect()
    assert outputs[0]() is None
    assert outputs[1]() is not None


def test_mixed_precision_runs_the_forward_pass_in_the_dtype_of_autocast():
    detail = {"autocast_dtype": "bfloat16", "grad_scaler": True}
    step, parts = parts_of(row_of(CUSTOM, precision="amp", precision_detail=detail))
    dtypes = []
    parts.model.register_forward_hook(lambda *args: dtypes.append(args[-1].dtype))
    step()
    assert dtypes == [torch.bfloat16]
    assert parts.model[0].weight.grad.dtype == torch.float32


def test_a_scaler_leaves_the_gradients_as_they_are():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    scaler = optimizers.Scaler("cpu")
    scaler.backward((weight * weight).sum())
    scaler.step(torch.optim.SGD([weight], lr=0.0))
    assert torch.equal(weight.grad, torch.tensor([2.0, 4.0]))


def test_eight_bit_adam_keeps_two_bytes_and_two_scales_per_block():
    row = row_of(CUSTOM, optimizer="bitsandbytes.optim.AdamW8bit")
    row = replace(row, constructor={"layers": [["Linear", 64, 128], ["Linear", 128, 3]]})
    row = replace(row, inputs=(replace(row.inputs[0], shape=(4, 64)), row.inputs[1]))
    step, parts = parts_of(row)
    step()
    large = parts.optimizer.state[parts.model[0].weight]
    small = parts.optimizer.state[parts.model[1].weight]
    assert sum(each.nbytes for each in large.values()) == 2 * 8192 + 2 * 4 * 32
    assert sum(each.nbytes for each in small.values()) == 2 * 4 * 384


def test_a_small_transformers_row_trains_on_the_cpu():
    needs("transformers")
    step, parts = parts_of(row_of(TINY_GPT2))
    step()
    assert type(parts.model).__name__ == "GPT2LMHeadModel"
    assert len(parts.model.transformer.h) == 2
    assert parts.batch["labels"] is parts.batch["input_ids"]
    assert parts.model.lm_head.weight is parts.model.transformer.wte.weight


def test_a_padded_batch_gets_its_masks():
    needs("transformers")
    spec = {"shape": [2, 6], "dtype": "int64"}
    names = ("input_ids", "attention_mask", "labels")
    inputs = [{"name": name, **spec} for name in names]
    row = row_of(TINY_GPT2, input=inputs, loss="model(**batch).loss", attention="sdpa")
    step, _ = parts_of(row)
    seen = []
    usual = torch.nn.functional.scaled_dot_product_attention

    def look(*args, attn_mask=None, **kwargs):
        seen.append(attn_mask is not None)
        return usual(*args, attn_mask=attn_mask, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = look
    try:
        step()
    finally:
        torch.nn.functional.scaled_dot_product_attention = usual
    assert seen == [True, True]


@pytest.mark.parametrize(("version", "is_laid_out"), [("5.17.0", False), ("5.20.0", True)])
def test_position_biases_lie_as_in_the_transformers_of_the_row(version, is_laid_out):
    row = row_of(TINY_GPT2, library_versions={"transformers": version})
    module = packages.load_package("transformers.integrations.sdpa_attention")
    bias, data = torch.zeros(6, 6, 2).permute(2, 0, 1)[None], torch.zeros(1, 2, 6, 4)
    with attention.biases_as_run(row):
        mask = module.create_position_bias_mask(bias, None, False, data, data)
    assert mask.is_contiguous() == is_laid_out


def test_a_small_row_with_packed_weights_and_adapters_runs_on_the_cpu():
    needs("transformers", "peft", "bitsandbytes")
    step, parts = parts_of(row_of(TINY_LLAMA))
    kinds = {type(each).__name__ for each in parts.model.modules()}
    trained = [each for each in parts.model.parameters() if each.requires_grad]
    step()

    assert "Linear4bit" in kinds
    assert {each.dtype for each in trained} == {torch.float32}
    assert len(trained) == 2 * 2 * 2
    assert all(each.grad is not None for each in trained)
    assert type(parts.model.get_output_embeddings()) is nn.Linear


def test_unpacked_weights_multiply_as_bitsandbytes_does():
    needs("bitsandbytes")
    functional = packages.load_package("bitsandbytes").functional
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    inputs = torch.randn(3, 64, requires_grad=True)
    product = quantized._Matmul4Bit.apply(inputs, packed, None, state)
    product.sum().backward()

    expected = functional.dequantize_4bit(packed, state)
    assert torch.allclose(product, inputs @ expected.T, atol=1e-5)
    assert torch.allclose(inputs.grad, expected.sum(0).expand(3, -1), atol=1e-5)


def test_key_and_value_heads_are_repeated_to_those_of_the_queries():
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query, key, key, enable_gqa=True)
    with attention.repeated_heads():
        found = torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    assert torch.allclose(found, expected, atol=1e-6)


# --- what rows may say -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "cross_entropy(model(x), target), inside autocast",
        "CrossEntropyLoss()(model(x), target)",
        "torch.nn.functional.cross_entropy(model(x), target)",
        "F.cross_entropy(model(inputs), labels)",
        "nn.CrossEntropyLoss()(model(x), y)",
        "cross-entropy over the classes",
        "-log_softmax(model(x), dim=-1)[:, 0].mean() + 0 * target.sum()",
    ],
)
def test_a_loss_is_read_from_its_expression_or_its_words(text):
    row = row_of(CUSTOM, loss=text)
    model = models.build_blank(row)
    batch = {"x": torch.randn(4, 8), "target": torch.zeros(4, dtype=torch.int64)}
    loss, output = losses.loss_of(row)(model.eval(), batch)
    expected = torch.nn.functional.cross_entropy(model(batch["x"]), batch["target"])
    assert torch.allclose(loss, expected)
    assert output.shape == (4, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": None}, "is no expression"),
        ({"loss": "custom_loss(model(x), target)"}, "custom_loss"),
        ({"loss": "model(x).__class__"}, "private"),
        ({"constructor": {}}, "lists no layers"),
        ({"constructor": {"layers": [["Lineal", 8, 3]]}}, "Lineal"),
        ({"optimizer": "torch.optim.Sophia"}, "Sophia"),
        ({"optimizer": "bitsandbytes.optim.PagedAdamW"}, "PagedAdamW"),
        ({"precision_detail": {"parameters": "float7"}}, "float7"),
        ({"model_library": "transformers", "model": "owner/unheard-of"}, "unheard-of"),
        ({"model_library": "torchvision", "model": "resnet5"}, "resnet5"),
        ({"gradient_checkpointing": True}, "no gradient checkpointing"),
        ({"quantization": {"type": "nf4"}}, "transformers models only"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_with_the_reason(changes, words):
    fields = CUSTOM | changes
    if fields["model_library"] != "custom":
        fields = fields | {"constructor": {}}
    row = row_of(fields)
    needs_for(replace(row, quantization=None))
    with pytest.raises(packages.CannotRebuild, match="cannot be rebuilt") as caught:
        rebuilding.rebuild(row, "cpu").setup()()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("library", "call", "num_params"),
    [
        ("torchvision", "torchvision.models.resnet18(weights=None, num_classes=10)", 11_181_642),
        ("torchvision", "torchvision.models.vit_b_16()", 86_567_656),
        ("torchvision", "torchvision.models.swin_t(weights='DEFAULT')", 28_288_354),
        pytest.param(
            "timm",
            "timm.create_model('resnet18', pretrained=True, num_classes=10)",
            11_181_642,
            marks=pytest.mark.slow,
        ),
        ("transformers", "BertForSequenceClassification.from_pretrained(name)", 109_483_778),
        ("transformers", "AutoModelForSequenceClassification.from_pretrained(n)", 109_483_778),
        ("transformers", "BertModel(BertConfig(num_hidden_layers=1))", 31_515_648),
    ],
)
def test_a_model_is_built_from_its_constructor_call(library, call, num_params):
    needs(library)
    row = row_of(CUSTOM, model_library=library, model="bert-base-uncased")
    row = replace(row, constructor={"call": call})
    assert models.count_parameters(row)[0] == num_params


@pytest.mark.parametrize(
    ("text", "implementation", "is_pinned"),
    [
        ("eager", "eager", False),
        ("sdpa pinned to EFFICIENT_ATTENTION, K/V heads repeated before the call", "sdpa", True),
        ("transformers default (sdpa); no attention mask is passed", None, False),
        (None, None, False),
    ],
)
def test_attention_is_what_the_row_asks_for(text, implementation, is_pinned):
    row = row_of(CUSTOM, attention=text)
    assert attention.attention_implementation(row) == implementation
    assert (attention.pinned_backend(row) is not None) == is_pinned


@pytest.mark.parametrize(
    ("source", "notes", "keeps", "copies"),
    [
        ("fitcheck", [], True, False),
        ("xMem", [], True, True),
        ("elsewhere", ["the logits tensor is not kept by name during backward"], False, False),
        ("elsewhere", ["the model output object stays alive during backward"], True, False),
    ],
)
def test_the_protocol_follows_the_source_and_the_notes(source, notes, keeps, copies):
    protocol = protocols.protocol_of(row_of(CUSTOM, source=source, notes=notes))
    assert protocol.keeps_output == keeps
    assert protocol.copies_batch_each_step == copies
    assert protocol.resets_peak == (source != "xMem")
