"""Render predictions, plans and runs; nothing about memory is computed here."""
