"""What the CPU's kernels take inside; oneDNN's as torch 2.13 has them, in version 3.12."""
