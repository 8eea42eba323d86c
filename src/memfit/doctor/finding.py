"""What a check says: what was found, what was needed, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Say how bad a finding is; only a problem makes the command fail."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; a run works."""
    WARNING = "warning"
    """Some runs are slow, hang or fail."""
    PROBLEM = "problem"
    """What is installed fails when it is used."""
    NOT_APPLICABLE = "not applicable"
    """Nothing to check here; ``found`` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding of one check."""

    name: str
    status: Status
    found: str
    needed: str = ""
    remedy: str = ""
    """What to do, in words; a fault always has it."""
    command: str = ""
    """The command that does it, where one does."""


def fine(name: str, found: str) -> Finding:
    """Say that something is as it should be."""
    return Finding(name=name, status=Status.OK, found=found)


def not_applicable(name: str, reason: str) -> Finding:
    """Say that there is nothing to check here, and why."""
    return Finding(name=name, status=Status.NOT_APPLICABLE, found=reason)
