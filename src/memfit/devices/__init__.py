"""Devices as data: the catalogue of what a step can run on, and what this machine has."""
