"""Losses and models of ordinary practice, and what cutting and recomputing does to their steps."""
