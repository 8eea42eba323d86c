"""Chooses what to keep and what to recompute, exactly, from a recorded step."""
