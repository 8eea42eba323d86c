"""What the CPU's kernels take inside, oneDNN's read off version 3.11 as torch 2.13 has it."""
