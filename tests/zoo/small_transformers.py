"""Small models of transformers, built from their configurations, without dropout."""

from __future__ import annotations

from typing import Any

import pytest
from tests.zoo.installed_transformers import part_of_transformers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TOKENS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**SIZES, "num_attention_heads": 4}
        | dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 512}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"num_layers": 2, "num_heads": 4, "d_model": 32, "d_ff": 64, "d_kv": 8}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
}
EACH_MODEL = pytest.mark.parametrize("name", MODELS)


def config_of(name: str, **options: Any) -> Any:
    """Return the configuration of a model; skip the test where it is not to be had."""
    _, config_name, sizes = MODELS[name]
    return part_of_transformers(config_name)(**{**TOKENS, **sizes, **options})


def model_of(name: str, config: Any) -> Any:
    return part_of_transformers(MODELS[name][0])(config).train()
