"""Records training scripts as they are: on real host data and a virtual device."""
