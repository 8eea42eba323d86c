"""What the CPU's kernels take inside, as torch 2.13 has them with oneDNN 3.12 under AVX-512.

The rules return bytes on top of the operator's outputs. They were read off the allocator's events
(2026-11-21) and agree with them to the byte for attention, for LSTMs in fp32 and for nearly all
convolutions in fp32; below fp32 they lie a little above them. oneDNN lays data out in blocks of 16
channels; processors without AVX-512 use 8, which these rules don't follow.
"""

from __future__ import annotations

from memfit.kernels.registration import Operators, tables_in

CPU_OPERATORS = Operators(tables_in(__name__, __path__))
