"""What CUDA's kernels take inside, and their workspaces."""
