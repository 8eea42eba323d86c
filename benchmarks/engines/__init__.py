"""Engines that share a job among ranks, each held against plain PyTorch on whole batches."""
