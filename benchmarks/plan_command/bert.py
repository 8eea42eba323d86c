"""BERT base, masked tokens, 512 of them."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForMaskedLM

from memfit import Job


def make_batch(batch_size: int) -> dict[str, torch.Tensor]:
    """Make tokens (B, 512), all of which are to be predicted."""
    ids = torch.randint(0, 30_522, (batch_size, 512))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


job = Job(
    model=lambda: BertForMaskedLM(BertConfig()),
    batch=make_batch,
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-5),
    batch_size=32,
)
