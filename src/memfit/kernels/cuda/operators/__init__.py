"""What CUDA does in the operators of torch: a file for each family, a registration for each one.

An in-place operator (``index_put_``) takes inside what its plain form does.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.kernels.registration import Operators, tables_in

_PLAIN = tables_in(__name__, __path__)

CUDA_OPERATORS = Operators(
    {
        **{f"{name}_": replace(each, choice=None, fake=None) for name, each in _PLAIN.items()},
        **_PLAIN,
    }
)
