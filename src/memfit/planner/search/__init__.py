"""Searches for the fastest combination of strategies that fits."""
