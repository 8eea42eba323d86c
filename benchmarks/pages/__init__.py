"""Turns results into the sections of the pages in docs, and the figures of README."""
