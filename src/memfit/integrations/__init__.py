"""Doors to training loops of other frameworks: each gives memfit objects, a batch and seams."""
