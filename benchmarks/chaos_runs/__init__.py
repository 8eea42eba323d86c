"""Runs in which something is broken at random, and what has to hold of each of them."""
