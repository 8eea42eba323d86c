"""What the CPU's kernels take inside, as torch 2.13 has them with oneDNN 3.12.

The rules return bytes on top of the operator's outputs. They were read off the allocator's events
(AVX-512: 2026-11-21, AVX2: 2026-11-25) and agree with them to the byte for attention, for LSTMs in
fp32 under AVX-512 and for nearly all convolutions in fp32; below fp32 they lie a little above them
under AVX-512. oneDNN lays data out in blocks of 16 channels under AVX-512 and of 8 under AVX2, and
chooses other kernels; ``convolutions`` follows both, the rules for LSTMs AVX-512 alone.
"""

from __future__ import annotations

from memfit.kernels.registration import Operators, tables_in

CPU_OPERATORS = Operators(tables_in(__name__, __path__))
