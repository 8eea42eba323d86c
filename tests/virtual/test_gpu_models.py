"""Models built from a configuration of transformers take a step on a virtual GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.zoo.installed_transformers import part_of_transformers

from memfit.devices.catalogue import load_device
from memfit.prediction.recording import record_steps
from memfit.trace.events import Category

FLOAT = 4
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
bf16 = torch.bfloat16
VOCABULARY, TOKENS = 100, 16
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
LLAMA = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
}
BERT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
}
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}
T5 = {
    "num_layers": 2,
    "num_heads": 2,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 16,
    "decoder_start_token_id": 0,
}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, bf16, FLASH),
    "gpt2 in fp32": ("GPT2LMHeadModel", "GPT2Config", GPT2, None, EFFICIENT),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, bf16, FLASH),
    "bert": ("BertForMaskedLM", "BertConfig", BERT, bf16, FLASH),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, None, None),
}


@pytest.mark.parametrize(
    ("model_name", "config_name", "options", "dtype", "kernel"), MODELS.values(), ids=MODELS
)
def test_a_model_built_from_its_configuration_takes_a_step(
    model_name, config_name, options, dtype, kernel
):
    model_class = part_of_transformers(model_name)
    config = part_of_transformers(config_name)(**SMALL, **options)

    def setup():
        model = model_class(config).cuda().train()
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(2, TOKENS, dtype=torch.long, device="cuda")

        def step():
            with torch.autocast("cuda", dtype=dtype or bf16, enabled=dtype is not None):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    trace = record_steps(setup, load_device("a100-40gb")).steady
    by_category = Counter()
    for allocation in trace.allocations:
        by_category[allocation.category] += allocation.num_bytes
    with torch.device("meta"):
        weights = FLOAT * sum(p.numel() for p in model_class(config).parameters())
    assert by_category[Category.PARAMETERS] == weights
    assert by_category[Category.GRADIENTS] == weights
    assert by_category[Category.OPTIMIZER_STATE] == 2 * weights
    if kernel is not None:
        found = {a.operator for a in trace.allocations if "scaled_dot_product" in a.operator}
        assert found == {kernel, f"{kernel}_backward"}
