"""Variables of the environment that cost memory or time, hide cards, or let a run hang.

Sources: NCCL's "Environment Variables" for version 2.29; ``ProcessGroupNCCL.hpp`` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memfit.units import MIB, format_bytes

from .finding import Finding, Status, fine
from .machine import Machine

_NCCL_BUFFER_BYTES = 4 * MIB
_ON = frozenset({"1", "true", "on", "yes", "y"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A variable, the values of it that matter, and what they do."""

    name: str
    matters: Callable[[str], bool]
    effect: str
    status: Status = Status.NOTE
    needed: str = ""


def _is_on(value: str) -> bool:
    return value.strip().lower() in _ON


def _is_off(value: str) -> bool:
    return value.strip().lower() in {"0", "false", "off", "no", "n"}


def _is_large_buffer(value: str) -> bool:
    return value.isdigit() and int(value) > _NCCL_BUFFER_BYTES


def _is_any(value: str) -> bool:
    return bool(value)


_SETTINGS = (
    _Setting(
        name="NCCL_BUFFSIZE",
        matters=_is_large_buffer,
        effect=f"each channel to each peer takes this much of the card, not "
        f"{format_bytes(_NCCL_BUFFER_BYTES)}",
    ),
    _Setting(
        name="NCCL_MIN_NCHANNELS",
        matters=_is_any,
        effect="more channels take more buffers on the card",
    ),
    _Setting(
        name="NCCL_P2P_DISABLE",
        matters=_is_on,
        effect="cards exchange data through the host's memory; slow with NVLink",
    ),
    _Setting(
        name="NCCL_SHM_DISABLE",
        matters=_is_on,
        effect="processes of one machine exchange data through the network",
    ),
    _Setting(
        name="NCCL_IB_DISABLE",
        matters=_is_on,
        effect="machines exchange data through sockets, not InfiniBand",
    ),
    _Setting(
        name="NCCL_DEBUG",
        matters=lambda value: value.upper() == "TRACE",
        effect="every call is logged, which slows training",
    ),
    _Setting(
        name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
        matters=_is_off,
        effect="when one rank fails, the others wait for it without end",
        status=Status.WARNING,
        needed="3, which is the default",
    ),
    _Setting(
        name="TORCH_NCCL_BLOCKING_WAIT",
        matters=_is_on,
        effect="each collective stops the process until it is done",
    ),
    _Setting(
        name="CUDA_LAUNCH_BLOCKING",
        matters=_is_on,
        effect="each kernel stops the process until it is done; for finding errors only",
        status=Status.WARNING,
        needed="unset, or 0, for training",
    ),
    _Setting(
        name="PYTORCH_NO_CUDA_MEMORY_CACHING",
        matters=_is_any,
        effect="each tensor is a cudaMalloc, which is slow, and no peak is predicted for it",
        status=Status.WARNING,
        needed="unset: any value counts, 0 too",
    ),
    _Setting(
        name="CUDA_VISIBLE_DEVICES",
        matters=lambda value: value.strip() in {"", "-1"},
        effect="all cards are hidden",
        status=Status.WARNING,
        needed="unset, or the numbers of cards, to train on one",
    ),
)


def check_settings(machine: Machine) -> Iterator[Finding]:
    """Name each variable that is set to something that matters."""
    found = [
        Finding(
            name=each.name,
            status=each.status,
            found=f"{each.name}={machine.variables[each.name]}: {each.effect}",
            needed=each.needed,
            remedy=f"Unless it is meant, take {each.name} out of the environment.",
            command=f"unset {each.name}",
        )
        for each in _SETTINGS
        if each.name in machine.variables
        and each.matters(machine.variables[each.name])
        and _is_read(machine, each.name)
    ]
    if _is_read(machine, "NCCL_SOCKET_IFNAME"):
        found.extend(_check_interface(machine))
    yield from found or [fine("settings", "no variable of NCCL or CUDA that slows or hangs a run")]


def _is_read(machine: Machine, name: str) -> bool:
    """Return whether anything here reads a variable: a card, or a torch for one."""
    if name == "CUDA_VISIBLE_DEVICES":
        return machine.driver_version is not None
    return machine.torch is not None and bool(machine.torch.cuda or machine.torch.hip)


def _check_interface(machine: Machine) -> Iterator[Finding]:
    """Check that NCCL_SOCKET_IFNAME leaves an interface: without one NCCL does not start."""
    name = "NCCL_SOCKET_IFNAME"
    value = machine.variables.get(name, "").strip()
    folder = machine.at("/sys/class/net")
    if not value or not folder.is_dir():
        return
    there = sorted(path.name for path in folder.iterdir())
    if any(_selects(value, each) for each in there):
        return
    yield Finding(
        name=name,
        status=Status.PROBLEM,
        found=f"{name}={value}, and this machine has {', '.join(there)}",
        needed="the beginning of an interface's name; =NAME for exactly it, ^NAME for all others",
        remedy="Name an interface that all machines of the run share, or leave the choice to NCCL.",
        command=f"unset {name}",
    )


def _selects(value: str, interface: str) -> bool:
    """Return whether NCCL would take an interface: by prefix, exactly (=), or all but these (^)."""
    is_others, value = value.startswith("^"), value.removeprefix("^")
    is_exact, value = value.startswith("="), value.removeprefix("=")
    names = [each.partition(":")[0] for each in value.split(",") if each]
    hit = any(interface == each if is_exact else interface.startswith(each) for each in names)
    return hit is not is_others
