"""Ordinary training loops with state of their own, made to run out of memory anywhere."""
