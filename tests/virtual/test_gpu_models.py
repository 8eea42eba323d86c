"""Models built from a configuration of transformers take a step on a virtual GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.zoo.small_transformers import config_of, model_of

from memfit.devices.catalogue import load_device
from memfit.prediction.recording import record_steps
from memfit.trace.events import Category

pytestmark = pytest.mark.slow

FLOAT = 4
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
bf16 = torch.bfloat16
TOKENS = 16
RATES = {
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "llama": (),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
}


@pytest.mark.parametrize(
    ("name", "dtype", "kernel"),
    [
        ("gpt2", bf16, FLASH),
        ("gpt2", None, EFFICIENT),
        ("llama", bf16, FLASH),
        ("bert", bf16, FLASH),
        ("t5", None, None),
    ],
)
def test_a_model_built_from_its_configuration_takes_a_step(name, dtype, kernel):
    config = config_of(name, **dict.fromkeys(RATES[name], 0.1))

    def setup():
        model = model_of(name, config).cuda()
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
        weights = FLOAT * sum(p.numel() for p in model_of(name, config).parameters())
    assert by_category[Category.PARAMETERS] == weights
    assert by_category[Category.GRADIENTS] == weights
    assert by_category[Category.OPTIMIZER_STATE] == 2 * weights
    if kernel is not None:
        found = {a.operator for a in trace.allocations if "scaled_dot_product" in a.operator}
        assert found == {kernel, f"{kernel}_backward"}
