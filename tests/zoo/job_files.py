"""Files that hold jobs, as text."""

LINEAR_JOB = """
import torch
import memfit

job = memfit.Job(
    model=lambda: torch.nn.Linear(4, 2),
    batch=lambda size: torch.ones(size, 4),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=8,
)
"""
