"""Proves on a job itself that plans keep the results."""
