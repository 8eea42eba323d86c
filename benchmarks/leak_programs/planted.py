"""The programs that leak, and what has to be named in each."""

from __future__ import annotations

from . import planted_holders, planted_steps
from .training import programs_in

PLANTED = programs_in(planted_steps, planted_holders)
