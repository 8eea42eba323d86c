"""LoRA on a Llama of one billion parameters, in bfloat16."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from memfit import Job

LENGTH = 1024


def build_model() -> torch.nn.Module:
    """Build Llama 3.2's 1 B shape with adapters on attention's projections."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        use_cache=False,
    )
    adapters = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model: torch.nn.Module = get_peft_model(LlamaForCausalLM(config).bfloat16(), adapters)
    return model


def make_batch(batch_size: int) -> dict[str, torch.Tensor]:
    """Make tokens (B, LENGTH), which are their own labels."""
    ids = torch.randint(0, 128_256, (batch_size, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


job = Job(
    model=build_model,
    batch=make_batch,
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-4),
    batch_size=16,
)
