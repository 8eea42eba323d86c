"""A virtual GPU: what CUDA would choose, while a step is recorded on fake tensors."""
