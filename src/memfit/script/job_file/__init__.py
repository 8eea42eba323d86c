"""Writes a memfit.Job out of a training script, and proves it against the script."""
