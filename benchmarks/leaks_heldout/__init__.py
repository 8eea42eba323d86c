"""Programs on which the leak finder was never tuned, as users of PyTorch write them."""
