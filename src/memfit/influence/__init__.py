"""Exact inner products of per-sample gradients, without the gradients."""
