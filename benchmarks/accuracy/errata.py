"""What fitcheck's files say of their rows and their own readings contradict.

Found with the rows here; each holds for a whole file of the source, whatever the configuration.

- ``t4-qlora-2026-09-01.json`` names transformers 5.0.0, which reads weights ahead. With weights
  read one by one, allocated and reserved bytes of all four rows here agree to the MiB in which they
  were printed; read ahead they do not. Versions before 5 and from 5.4 on read one by one.
- ``t4-sweep-2026-09-15.json`` names torch 2.14.0+cu130, transformers 5.17.0 and peft 0.20.0. What
  lies outside the allocator is the same to the byte as in the rows of torch 2.10.0+cu128;
  allocated bytes agree to the byte under 2.10's rules and are 2 MiB off under 2.14's; bytes after
  loading differ between two rows that load alike, which only threads do; and the reserved bytes of
  the 4-bit rows are those of weights read ahead and of a cache that was not emptied. So these rows
  are rebuilt with the versions of the files of the days after: 2.10.0+cu128, 5.0.0 and 0.19.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "t4-qlora-2026-09-01.json": {"constructor": {"reads_ahead": False}},
    "t4-sweep-2026-09-15.json": {
        "torch_version": "2.10.0+cu128",
        "cuda_version": "12.8",
        "library_versions": {"transformers": "5.0.0", "peft": "0.19.1"},
    },
}


def corrected(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's fields with what is known to be wrong in its file put right."""
    fields = dict(value)
    file = str(fields.get("source_path") or "").partition("#")[0].rpartition("/")[2]
    for name, correction in _CORRECTIONS.get(file, {}).items():
        is_mapping = isinstance(correction, Mapping)
        fields[name] = {**(fields.get(name) or {}), **correction} if is_mapping else correction
    return fields
