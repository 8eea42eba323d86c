"""Predicts what a step takes: recorded on fake tensors, as planned, and replayed."""
