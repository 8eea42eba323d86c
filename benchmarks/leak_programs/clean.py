"""The programs that do not leak, though much in them grows for a while."""

from __future__ import annotations

from . import clean_caches, clean_training
from .training import programs_in

CLEAN = programs_in(clean_caches, clean_training)
