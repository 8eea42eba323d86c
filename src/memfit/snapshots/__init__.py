"""Memory snapshots of PyTorch: read without running anything, explained, and replayed; no torch."""
