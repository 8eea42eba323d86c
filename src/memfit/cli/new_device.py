"""Writes a file with the figures of a card: from flags, or asked for where somebody is there."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import DataError, UsageError
from memfit.units import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.devices.spec import Device, Fact

_TERA = 1e12
_SECOND = re.compile(r"\s*(?:/\s*s|per\s+second|ps)\s*$", re.IGNORECASE)
_RATE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:t(?:flops?)?(?:/s)?)?\s*", re.IGNORECASE)
_CAPABILITY = re.compile(r"\s*(\d{1,2})\.(\d)\s*")
_FIRST_WITH_BFLOAT16 = 8
_MOST_TRIES = 3
_LINK = "31.5GB/s"
_CONTEXT_BYTES = 524288000
_LAUNCH_SECONDS = 7e-6
_GUESSES = {
    "link_bytes_per_second": "Guess: PCI Express 4.0 x16, nominal, one way",
    "context_bytes": "Guess: 300 to 760 MiB is usual; replace it by what nvidia-smi shows for a "
    "process that trains, less torch.cuda.memory_reserved()",
    "launch_seconds": "Guess: eager PyTorch spends about 7 us per operator on the host",
}
_Value = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """One figure that is asked for."""

    flag: str
    metavar: str
    question: str
    read: Callable[[str], _Value]


def _read_rate(text: str) -> float:
    match = _RATE.fullmatch(text)
    if match is None or not float(match[1]):
        msg = f"{text!r} is no rate; write it in TFLOP/s, such as 35.6"
        raise ValueError(msg)
    return float(match[1]) * _TERA


def _read_bandwidth(text: str) -> float:
    return float(parse_bytes(_SECOND.sub("", text)))


def _read_capability(text: str) -> str:
    match = _CAPABILITY.fullmatch(text)
    if match is None:
        msg = f"{text!r} is no compute capability; write it as 8.6"
        raise ValueError(msg)
    return f"{match[1]}.{match[2]}"


_FIGURES = {
    "memory": _Figure(
        flag="--memory",
        metavar="SIZE",
        question="Memory, as nvidia-smi shows it (24564MiB)",
        read=parse_bytes,
    ),
    "bandwidth": _Figure(
        flag="--bandwidth",
        metavar="RATE",
        question="Memory bandwidth (936GB/s)",
        read=_read_bandwidth,
    ),
    "float32": _Figure(
        flag="--float32",
        metavar="TFLOPS",
        question="float32 rate in TFLOP/s (35.6)",
        read=_read_rate,
    ),
    "half": _Figure(
        flag="--half",
        metavar="TFLOPS",
        question="float16 and bfloat16 rate of the tensor cores in TFLOP/s, dense (71)",
        read=_read_rate,
    ),
    "compute_capability": _Figure(
        flag="--compute-capability",
        metavar="X.Y",
        question="Compute capability (8.6), see https://developer.nvidia.com/cuda-gpus",
        read=_read_capability,
    ),
}


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--new`` and the figures of a card."""
    group = parser.add_argument_group("a card that is not in the catalogue")
    group.add_argument(
        "--new", metavar="FILE.toml", help="write a file with its figures, which --device takes"
    )
    for name, figure in _FIGURES.items():
        text = figure.question[0].lower() + figure.question[1:]
        group.add_argument(figure.flag, metavar=figure.metavar, dest=name, help=text)
    group.add_argument(
        "--link", metavar="RATE", help=f"to the host, one way (default {_LINK}, PCI Express 4.0)"
    )
    group.add_argument("--title", metavar="TEXT", help="what it is called; else the file's name")
    group.add_argument("--force", action="store_true", help="replace the file if it is there")


def refuse_figures(args: argparse.Namespace) -> None:
    """Refuse figures without a file to write them to.

    Raises:
        UsageError: if there are any.
    """
    asked = [figure.flag for name, figure in _FIGURES.items() if getattr(args, name) is not None]
    asked += [f"--{name}" for name in ("link", "title", "force") if getattr(args, name)]
    if asked:
        msg = f"{asked[0]} describes a card for --new FILE.toml; give that too."
        raise UsageError(msg)


def write_new_device(args: argparse.Namespace, console: Console) -> Device:
    """Write the file, after asking for what is missing.

    Raises:
        UsageError: if the file is there already, a figure makes no sense, or one is missing and
            nobody can be asked.
    """
    from memfit.devices.calibration import calibration_text
    from memfit.devices.device_file import SUFFIX, check_own_device, is_own_file
    from memfit.files import write_atomically

    path = Path(args.new)
    if args.device is not None:
        raise UsageError("Show a device, or write one with --new, not both.")
    if not is_own_file(path.name) or path.name.lower() == SUFFIX:
        msg = f"--new writes a TOML file, such as my-card{SUFFIX}, not {args.new!r}."
        raise UsageError(msg)
    if path.exists() and not args.force:
        raise UsageError(f"{path} is there already; --force replaces it.")
    values = _values(args, console)
    link = _read("--link", _read_bandwidth, args.link or _LINK)
    facts = _facts(values, link, is_told=args.link is not None)
    text = _head(args.title or path.stem, str(values["compute_capability"]))
    text += calibration_text(facts, header="")
    try:
        device = check_own_device(args.new, text)
        write_atomically(path, text)
    except DataError as error:
        raise UsageError(f"Nothing was written: {error}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
    return device


def _values(args: argparse.Namespace, console: Console) -> Mapping[str, _Value]:
    """Read the flags, and ask for the others where somebody is there."""
    given = {
        name: _read(figure.flag, figure.read, getattr(args, name))
        for name, figure in _FIGURES.items()
        if getattr(args, name) is not None
    }
    missing = [name for name in _FIGURES if name not in given]
    if missing and (args.json or not sys.stdin.isatty()):
        flags = ", ".join(_FIGURES[name].flag for name in missing)
        why = "with --json" if args.json else "without a terminal"
        msg = f"Missing: {flags}. Nothing can be asked for {why}; give them as flags."
        raise UsageError(msg)
    return given | {name: _ask(_FIGURES[name], console) for name in missing}


def _ask(figure: _Figure, console: Console) -> _Value:
    """Ask for a figure until it makes sense, a few times."""
    for _ in range(_MOST_TRIES):
        try:
            return figure.read(console.input(f"{figure.question}: ", markup=False))
        except ValueError as error:
            console.print(f"{error}.", markup=False)
        except EOFError:
            break
    raise UsageError(f"There was no answer for {figure.flag}; nothing was written.")


def _read(flag: str, read: Callable[[str], _Value], text: str) -> _Value:
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}.") from error


def _facts(values: Mapping[str, _Value], link: _Value, *, is_told: bool) -> dict[str, Fact]:
    """Put the figures into the form of the catalogue, each with how it is known."""
    capability = str(values["compute_capability"])
    halves = ["float16"]
    if int(capability.partition(".")[0]) >= _FIRST_WITH_BFLOAT16:
        halves.append("bfloat16")
    numbers: dict[str, _Value] = {
        "memory_bytes": values["memory"],
        "memory_bandwidth_bytes_per_second": values["bandwidth"],
        "link_bytes_per_second": link,
        "context_bytes": _CONTEXT_BYTES,
        "launch_seconds": _LAUNCH_SECONDS,
        "matrix_float32_flops_per_second": values["float32"],
        **{f"matrix_{dtype}_flops_per_second": values["half"] for dtype in halves},
    }
    return {name: _fact(name, number, is_told=is_told) for name, number in numbers.items()}


def _fact(name: str, number: _Value, *, is_told: bool) -> Fact:
    from memfit.devices.spec import Fact
    from memfit.figures import Certainty

    is_guess = name in _GUESSES and not (is_told and name == "link_bytes_per_second")
    return Fact(
        value=float(number) if isinstance(number, str) else number,
        source=_GUESSES[name] if is_guess else "given to `memfit devices --new`",
        read_on=date.today().isoformat(),
        certainty=(Certainty.GUESS if is_guess else Certainty.TABLE).value,
    )


def _head(title: str, capability: str) -> str:
    """Write what stands above the figures."""
    import json

    return (
        "# A card for `memfit predict FILE.py:job --device` and this file's path.\n"
        "# Better figures may be written here, each with its source and date.\n"
        f"title = {json.dumps(title, ensure_ascii=False)}\n"
        'kind = "cuda"\n'
        f"compute_capability = {json.dumps(capability)}\n\n"
    )
