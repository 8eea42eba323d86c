"""Training steps that other people measured on real GPUs, rebuilt from their published rows."""
