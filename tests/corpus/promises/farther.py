"""Imported by a forward alone."""

COUNTS = {"forward": 0}
