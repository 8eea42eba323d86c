"""Measures what steps take: they really run here."""
