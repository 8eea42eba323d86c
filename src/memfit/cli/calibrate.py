"""``memfit calibrate``: measure the figures of this machine's card or processor, and keep them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import date
from typing import TYPE_CHECKING

from memfit.errors import DeviceUnavailableError, UsageError
from memfit.units import format_seconds

from .command import Command, add_json_argument, write_json
from .job_arguments import status

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from memfit.devices.detect import Host
    from memfit.devices.measuring import Card
    from memfit.devices.spec import Device, Fact


class CalibrateCommand:
    """Measure the card of this machine, so that predictions for it rest on readings.

    Read are the CUDA context as libraries load, the workspaces of cuBLAS, memory bandwidth, matrix
    rates, the link to the host and the time of a launch. It takes under a minute; nothing else
    should use the card meanwhile. With --device cpu the processor is measured, in seconds: matrix
    rates, memory, cache and the time of a call. The figures are kept in the configuration folder
    (MEMFIT_CONFIG_DIR, else memfit in XDG_CONFIG_HOME, else ~/.config/memfit) and take the place of
    the catalogue's from then on. Deleting the file undoes that.
    """

    example = "memfit calibrate --dry-run"

    def __init__(
        self,
        find_host: Callable[[], Host] | None = None,
        open_card: Callable[[int], Card] | None = None,
    ) -> None:
        """Take where to look for cards and how to open one; by default torch's."""
        self._find_host = find_host
        self._open_card = open_card

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the device and what to do with the figures."""
        parser.add_argument(
            "--device",
            metavar="NAME",
            help=(
                "which card of this machine, by its name in `memfit devices`, or cpu; else the "
                "first card"
            ),
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="say what would be measured and kept, and where"
        )
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Measure, store and show what has changed."""
        from memfit.devices.calibration import calibration_path, write_calibration
        from memfit.devices.catalogue import catalogued_device

        name, index = _chosen(args.device, self._find_host or _host)
        path = calibration_path(name)
        if path is None:
            msg = "No home folder was found; set MEMFIT_CONFIG_DIR to a folder."
            raise UsageError(msg)
        if args.dry_run:
            _show_intention(name, path, console, as_json=args.json)
            return 0
        started = time.perf_counter()
        with status(console, f"measuring {name}", quiet=args.json):
            facts = self._measured(index)
        write_calibration(path, facts)
        seconds = time.perf_counter() - started
        if args.json:
            kept = {each: asdict(fact) for each, fact in facts.items()}
            write_json({"device": name, "path": str(path), "seconds": seconds, "facts": kept})
            return 0
        console.print(_changes_table(catalogued_device(name), facts))
        console.print(f"\nMeasured in {format_seconds(seconds)} and kept in", markup=False)
        console.print(str(path), soft_wrap=True, markup=False)
        return 0

    def _measured(self, index: int | None) -> dict[str, Fact]:
        """Measure the card of this index, or the processor."""
        if index is None:
            return _measured_processor()
        from memfit.devices.calibration import as_facts
        from memfit.devices.measuring import measure_card

        card = (self._open_card or _torch_card)(index)
        return as_facts(measure_card(card), card.identity(), date.today())


COMMAND: Command = CalibrateCommand()


def _host() -> Host:
    from memfit.devices.detect import host

    return host()


def _torch_card(index: int) -> Card:
    import torch

    from memfit.devices.measuring import TorchCard

    return TorchCard(torch, index)


def _measured_processor() -> dict[str, Fact]:
    import torch

    from memfit.devices.calibration import facts_of_processor, with_calibration
    from memfit.devices.catalogue import catalogued_device
    from memfit.devices.measuring_processor import TorchProcessor, measure_processor
    from memfit.devices.spec import CPU
    from memfit.measurement.class_shares import measure_class_shares

    def kept(values: Mapping[str, float]) -> dict[str, Fact]:
        version, num_threads = str(torch.__version__), torch.get_num_threads()
        return facts_of_processor(values, version, num_threads, date.today())

    rates = kept(measure_processor(TorchProcessor(torch)))
    processor = with_calibration(catalogued_device(CPU), rates)
    return rates | kept(measure_class_shares(processor))


def _chosen(asked: str | None, find_host: Callable[[], Host]) -> tuple[str, int | None]:
    """Find what to measure: its name in the catalogue, and a card's index or None."""
    if asked == "cpu":
        return asked, None
    return _chosen_card(asked, find_host())


def _chosen_card(asked: str | None, machine: Host) -> tuple[str, int]:
    """Find the card to measure: its name in the catalogue, and its index.

    Raises:
        UnknownDeviceError: if the catalogue has no such name, or does not know the card.
        DeviceUnavailableError: if the card is not in this machine.
        UsageError: if it is no card that can be measured.
    """
    from memfit.devices.catalogue import catalogue_name, current_device_name

    if asked is not None:
        asked = _calibratable(asked)
    if not machine.cuda_devices:
        found = f"torch {machine.torch_version or 'is missing and'} finds no CUDA device"
        raise DeviceUnavailableError(asked or "A CUDA device", found)
    if asked is None:
        return _calibratable(current_device_name(machine)), 0
    names = [catalogue_name(each) for each in machine.cuda_devices]
    if asked not in names:
        there = ", ".join(each.name for each in machine.cuda_devices)
        raise DeviceUnavailableError(asked, f"there is: {there}")
    return asked, names.index(asked)


def _calibratable(asked: str) -> str:
    """Return the name in the catalogue of a card that can be measured.

    Raises:
        UnknownDeviceError: if the catalogue has no such name.
        UsageError: if it is AMD's, or described by a file.
    """
    from memfit.devices.catalogue import catalogued_device
    from memfit.devices.device_file import is_own_file
    from memfit.devices.spec import CUDA

    if is_own_file(asked):
        msg = f"{asked} is a file of your own: write what you know of the card into it."
        raise UsageError(msg)
    device = catalogued_device(asked)
    if device.platform != CUDA:
        msg = (
            "Only CUDA cards and the processor are calibrated, and not yet cards on ROCm: no "
            f"measurement was tried there. Name one of NVIDIA's, not {device.name}, or leave "
            "--device out."
        )
        raise UsageError(msg)
    return device.name


def _show_intention(name: str, path: Path, console: Console, *, as_json: bool) -> None:
    """Say what would be measured, and where it would be kept."""
    from memfit.devices.measuring import STAGES
    from memfit.devices.measuring_processor import PROCESSOR_STAGES

    stages = PROCESSOR_STAGES if name == "cpu" else STAGES
    if as_json:
        write_json({"device": name, "path": str(path), "measures": dict(stages)})
        return
    width = max(len(fact) for fact, _ in stages)
    lines = [f"{fact:<{width}}  {what}" for fact, what in stages]
    will_replace = " (a file there would be replaced)" if path.exists() else ""
    text = "\n".join([f"{name} would be measured:", "", *lines, "", "and its figures kept in"])
    console.print(text, soft_wrap=True, markup=False)
    console.print(f"{path}{will_replace}", soft_wrap=True, markup=False)


def _changes_table(device: Device, facts: Mapping[str, Fact]) -> Table:
    """Lay out what the catalogue says beside what was measured."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from .devices import format_fact

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("figure", overflow="fold")
    table.add_column("catalogue", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    for name, fact in facts.items():
        known = device.facts.get(name)
        before = "-" if known is None else format_fact(name, known.value)
        table.add_row(name, before, format_fact(name, fact.value))
    return table
