"""Compares outcomes of steps: how far they are apart, and in which precision that can be told."""
