"""An 8-billion-parameter decoder of Llama's shape as a memfit job: all of it trained, in bfloat16.

memfit plan benchmarks/large_llama.py:job --device h200
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memfit import Job

LENGTH = 4096
LLAMA = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "use_cache": False,
}


def build_model() -> torch.nn.Module:
    """Build the decoder."""
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**LLAMA))
    return model.bfloat16()


def make_batch(batch_size: int) -> dict[str, torch.Tensor]:
    """Make tokens (batch, LENGTH), which are their own labels."""
    ids = torch.randint(0, LLAMA["vocab_size"], (batch_size, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


job = Job(
    name="8 B decoder",
    model=build_model,
    batch=make_batch,
    loss=lambda model, inputs: model(**inputs).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
    batch_size=8,
)
