"""Turns a recorded step into seconds; pure Python, no torch."""
