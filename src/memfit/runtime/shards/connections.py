"""The connections of this process to other ranks, and how those of a gloo group are ended.

gloo ends a wait only where a connection ends. ``abort`` and ``shutdown`` of its groups end none
(torch 2.13), and destroying a group does so once nothing holds it any more, which nobody can be
sure of: meshes, C++ registries and work that is under way hold it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

_FOLDER = "/dev/fd"
Ends = tuple[str, str]
"""Addresses of a connection, this end first."""

_of_guards: set[int] = set()
"""Connections over which ranks agree, which are never ended; by the number of their socket."""


def connections() -> dict[int, Ends]:
    """Return connections over TCP that this process has, by the number of their socket."""
    return {number: ends for number, _, ends in _open_sockets()}


def note_connections_of_guard(before: Set[int]) -> None:
    """Note connections that were made since as those over which ranks agree."""
    _of_guards.update(connections().keys() - before)


def between_ranks(store: Any, name: str, rank: int, num_ranks: int) -> frozenset[int]:
    """Return the connections whose other end is one of another rank's; all ranks call it.

    Connections to the store, and those over which ranks agree, are left out.

    Args:
        store: that ranks meet in.
        name: used once.
        rank: this one.
        num_ranks: how many there are.
    """
    ports = {f":{port}" for port in _ports_of(store)}
    own = {
        number: ends
        for number, ends in connections().items()
        if number not in _of_guards and not any(end.endswith((*ports,)) for end in ends)
    }
    store.set(f"{name}-{rank}", json.dumps([*own.values()]))
    others = [store.get(f"{name}-{each}") for each in range(num_ranks) if each != rank]
    there = {(far, near) for said in others for near, far in json.loads(said)}
    return frozenset(number for number, ends in own.items() if ends in there)


def end(numbers: Set[int]) -> None:
    """End connections, whoever holds them: whoever waits in them gets an error at once."""
    for number, descriptor, _ in [*_open_sockets()]:
        if number not in numbers:
            continue
        with contextlib.suppress(OSError):  # the first that end may have others closed
            held = socket.socket(fileno=os.dup(descriptor))
            with contextlib.closing(held):
                if os.fstat(held.fileno()).st_ino == number:
                    held.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> Iterator[tuple[int, int, Ends]]:
    """Yield connected sockets: their number, their descriptor, and both addresses."""
    try:
        names = [path.name for path in Path(_FOLDER).iterdir()]
    except OSError:  # an operating system without it
        return
    for name in names:
        try:
            descriptor = int(name)
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with contextlib.closing(socket.socket(fileno=os.dup(descriptor))) as held:
                if held.type == socket.SOCK_STREAM and held.family != socket.AF_UNIX:
                    ends = _address(held.getsockname()), _address(held.getpeername())
                    yield status.st_ino, descriptor, ends
        except (OSError, ValueError):  # closed meanwhile, or not connected
            continue


def _address(name: tuple[Any, ...]) -> str:
    return f"{name[0]}:{name[1]}"


def _ports_of(store: Any) -> Iterator[int]:
    while store is not None:
        port = getattr(store, "port", None)
        if isinstance(port, int):
            yield port
        store = getattr(store, "underlying_store", None)
