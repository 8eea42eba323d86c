"""What CUDA would choose and hide, as data and pure functions; nothing here imports torch."""
