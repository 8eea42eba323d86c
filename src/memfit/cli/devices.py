"""``memfit devices``: the catalogue as a table, or one device with the source of each figure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from memfit.units import format_bytes, format_seconds

from .command import Command, add_json_argument, write_json
from .new_device import add_new_arguments, refuse_figures, write_new_device

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from memfit.devices.spec import Device, Fact

_TERA = 1e12
_BANDWIDTH = "memory_bandwidth_bytes_per_second"
_SHOWN_DTYPES = ("float32", "bfloat16", "float16")
_LEGEND = """
float32, bfloat16, float16: dense matrix rates in TFLOP/s; - where it has none.
CC: compute capability; ROCm, of which memfit has no readings: all is a guess.
`memfit devices NAME` shows where each figure is from; NAME may be "RTX 3090".
`memfit devices --new FILE.toml` describes a card that is not in the list."""


class DevicesCommand:
    """List the devices that memfit knows, or show one with every figure and its source.

    Rates are dense: figures that count on sparsity are never used. A figure is exact, from a
    table (a datasheet or a published reading) or a guess, and says so. --new writes a file for a
    card that is not in the list; what it needs and no flag gives, it asks for.
    """

    example = "memfit devices a100-40gb"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the optional device, the figures of a new one and ``--json``."""
        parser.add_argument(
            "device", metavar="NAME", nargs="?", help="show this device only, or a file of your own"
        )
        add_new_arguments(parser)
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Show the table or one device, or write a new one."""
        from memfit.devices.catalogue import all_devices, load_device

        if args.new is not None:
            device = write_new_device(args, console)
            if args.json:
                write_json({"path": args.new, "device": asdict(device)})
            else:
                console.print(f"Wrote {args.new}. Use it as --device {args.new}", markup=False)
            return 0
        refuse_figures(args)
        if args.device is not None:
            device = load_device(args.device)
            if args.json:
                write_json(asdict(device))
            else:
                _show_device(device, console)
        elif args.json:
            write_json({"devices": [asdict(device) for device in all_devices()]})
        else:
            console.print(_device_table(all_devices()))
            console.print(_LEGEND)
        return 0


COMMAND: Command = DevicesCommand()


def _device_table(devices: Sequence[Device]) -> Table:
    """Lay out the main figures of all devices, one row each."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from memfit.devices.names import by_series
    from memfit.devices.spec import ROCM

    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,  # one row stays one line in 80 columns
    )
    table.add_column("device", no_wrap=True)
    for heading in ("memory", "bandwidth", *_SHOWN_DTYPES, "CC"):
        table.add_column(heading, justify="right", no_wrap=True)
    known = {device.name: device for device in devices}
    for names in by_series({name: device.title for name, device in known.items()}).values():
        for device in map(known.__getitem__, names):
            number, unit = format_bytes(device.value(_BANDWIDTH)).split()
            table.add_row(
                device.name,
                format_bytes(device.memory_bytes),
                f"{float(number.replace(',', '')):,.0f} {unit}/s",
                *(_format_rate(device, dtype) for dtype in _SHOWN_DTYPES),
                "ROCm" if device.platform == ROCM else device.compute_capability or "-",
            )
        table.add_section()
    return table


def _format_rate(device: Device, dtype: str) -> str:
    """Write a dense rate in TFLOP/s, or a dash where there is none."""
    fact = device.facts.get(f"matrix_{dtype}_flops_per_second")
    return "-" if fact is None else f"{fact.value / _TERA:.4g}"


def _show_device(device: Device, console: Console) -> None:
    """Show one device, two lines per figure: the value, then where it comes from."""
    from memfit.devices.spec import ROCM

    capability = device.compute_capability
    heading = device.title + (f", compute capability {capability}" if capability else "")
    heading += ", on ROCm" if device.platform == ROCM else ""
    lines = [f"{device.name}: {heading}"]
    width = max(map(len, device.facts))
    for name, fact in device.facts.items():
        figure = f"{name:<{width}}  {format_fact(name, fact.value)}"
        lines += ["", figure, f"  {_format_source(fact)}"]
    # Sources hold addresses, which must stay whole to be opened.
    console.print("\n".join(lines), soft_wrap=True, markup=False)


def format_fact(name: str, value: float) -> str:
    """Write a figure in the unit that its name ends with."""
    if name.startswith("num_"):
        return f"{value:g}"
    if name.endswith("_flops_per_second"):
        return f"{value / _TERA:g} TFLOP/s"
    if name.endswith("_bytes_per_second"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_share"):
        return f"{value:.3g}"
    return format_seconds(value)


def _format_source(fact: Fact) -> str:
    """Write how a figure is known, since when and from where."""
    return f"{fact.certainty}, {fact.read_on}: {fact.source}"
