"""Figures that ``memfit calibrate`` measured on a card: where they are kept, and how they count.

They lie in the user's configuration folder, one TOML file per device, in the form of the catalogue.
A stored figure takes the place of the catalogue's; everything else of the device stays.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from memfit.errors import DataError
from memfit.figures import Certainty
from memfit.files import write_atomically
from memfit.journal.plain_text import parsed_toml, read_plain

from .facts import OPTIONAL_FACTS, REQUIRED_FACTS, check_keys, read_fact
from .spec import Device, Fact

_HEADER = """\
# Measured on this machine by `memfit calibrate`. Figures here take the place of the catalogue's.
# Delete this file to go back to the catalogue, or run the command again to measure anew.
"""
_COUNTS = ("_bytes", "num_multiprocessors")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardIdentity:
    """Which card was measured, and with which software."""

    driver_name: str
    """The name that the driver gives the card."""
    memory_bytes: int
    num_multiprocessors: int
    compute_capability: tuple[int, int]
    torch_version: str
    cuda_version: str | None
    driver_version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A stored file as it is now; it changes whenever the file is written anew."""

    path: Path
    inode: int
    modified_ns: int
    num_bytes: int


def configuration_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's configuration folder; None where the system knows no home folder.

    It is ``MEMFIT_CONFIG_DIR``, else ``memfit`` in ``XDG_CONFIG_HOME``, else in ``~/.config``.
    """
    own = environment.get("MEMFIT_CONFIG_DIR")
    if own:
        return Path(own)
    shared = environment.get("XDG_CONFIG_HOME")
    if shared:
        return Path(shared) / "memfit"
    try:
        return Path.home() / ".config" / "memfit"
    except RuntimeError:
        return None


def calibration_path(name: str) -> Path | None:
    """Return the file that holds the measured figures of a device; None without a home folder."""
    folder = configuration_folder()
    return None if folder is None else folder / "devices" / f"{name}.toml"


def stamp_of(path: Path | None) -> Stamp | None:
    """Look at a stored file; None where there is none, or its folder may not be entered."""
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return Stamp(
        path=path,
        inode=status.st_ino,
        modified_ns=status.st_mtime_ns,
        num_bytes=status.st_size,
    )


def as_facts(values: Mapping[str, float], card: CardIdentity, read_on: date) -> dict[str, Fact]:
    """Return measured values their source and date."""
    source = (
        f"measured by memfit calibrate on {card.driver_name}, torch {card.torch_version}, "
        f"CUDA {card.cuda_version or 'unknown'}, driver {card.driver_version or 'unknown'}"
    )
    return _measured_facts(values, source, read_on)


def facts_of_processor(
    values: Mapping[str, float], torch_version: str, num_threads: int, read_on: date
) -> dict[str, Fact]:
    """Return the measured values of this machine's processor with their source and date."""
    source = f"measured by memfit calibrate on this machine, torch {torch_version}, {num_threads} "
    source += "thread" if num_threads == 1 else "threads"
    return _measured_facts(values, source, read_on)


def _measured_facts(values: Mapping[str, float], source: str, read_on: date) -> dict[str, Fact]:
    return {
        name: Fact(
            value=int(value) if name.endswith(_COUNTS) else float(value),
            source=source,
            read_on=read_on.isoformat(),
            certainty=Certainty.EXACT.value,
        )
        for name, value in values.items()
    }


def read_calibration(path: Path) -> dict[str, Fact]:
    """Read the stored figures of a device.

    Raises:
        DataError: if the file is malformed; it says which file and how to get rid of the error.
    """
    try:
        text = read_plain(path)
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"it cannot be read ({error}). {_remedy(path)}") from error
    try:
        table = parsed_toml(text)
        check_keys(str(path), "the file", table, ("facts",), ())
        check_keys(str(path), "facts", table["facts"], (), (*REQUIRED_FACTS, *OPTIONAL_FACTS))
        facts = {name: read_fact(str(path), name, value) for name, value in table["facts"].items()}
        _check_values(path, facts)
    except ValueError as error:
        raise DataError(str(path), f"it is not valid TOML: {error}. {_remedy(path)}") from error
    except DataError as error:
        raise _with_remedy(path, error) from error
    return facts


def write_calibration(path: Path, facts: Mapping[str, Fact]) -> None:
    """Store figures so that a reader sees the old ones or the new ones."""
    write_atomically(path, calibration_text(facts))


def calibration_text(facts: Mapping[str, Fact], header: str = _HEADER) -> str:
    """Write figures in the form of the catalogue."""
    texts = (_fact_text(name, fact) for name, fact in facts.items())
    return "\n".join([header, *texts] if header else texts)


def with_calibration(device: Device, facts: Mapping[str, Fact]) -> Device:
    """Put measured figures in the place of the catalogue's."""
    return replace(device, facts={**device.facts, **facts})


def _fact_text(name: str, fact: Fact) -> str:
    # A JSON string is a TOML string too; Python writes every number as TOML reads it.
    return (
        f"[facts.{name}]\n"
        f"value = {fact.value!r}\n"
        f"source = {json.dumps(fact.source)}\n"
        f"read_on = {json.dumps(fact.read_on)}\n"
        f"certainty = {json.dumps(fact.certainty)}\n"
    )


def _check_values(path: Path, facts: Mapping[str, Fact]) -> None:
    """Refuse what no measurement gives: later divisions would fail far from the file."""
    for name, fact in facts.items():
        is_possible = fact.value >= 0 if name.endswith("_bytes") else fact.value > 0
        # A whole number of hundreds of digits is no float at all, and not below the largest one.
        if not (is_possible and fact.value <= sys.float_info.max):
            raise DataError(
                str(path), f"{name}.value is {str(fact.value)[:40]}; it must be above zero"
            )


def _with_remedy(path: Path, error: DataError) -> DataError:
    """Say the same, and what to do about a file that no one needs to repair by hand."""
    return DataError(str(path), f"{str(error).removeprefix(f'{path}: ')}. {_remedy(path)}")


def _remedy(path: Path) -> str:
    return f"Delete {path}, or run `memfit calibrate` again"
