"""Keeps a recorded script from starting programs and from talking to the network."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Self
from unittest.mock import patch

from memfit.script.question import Refused
from memfit.trace.origins import line_of_caller

PROGRAMS, NETWORK = "subprocess", "network"
_PROGRAM_EVENTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
_NETWORK_EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.bind")
_LOCAL = ("localhost", "127.0.0.1", "::1", "")


class RefusedOutsideError(PermissionError):
    """Say what a recorded script may not reach; scripts often go on without."""


class Outside:
    """Refuse what reaches out of this process, and list it.

    Args:
        allows: which kinds may pass: ``subprocess``, ``network``.
    """

    def __init__(self, allows: Sequence[str] = ()) -> None:
        self._allows = allows
        self._refused: dict[tuple[str, str], Refused] = {}
        self._is_on = False

    @property
    def refused(self) -> Sequence[Refused]:
        """Return what was refused, each once."""
        return tuple(self._refused.values())

    def watch(self) -> None:
        """Have Python tell of what it does; this stays until the process ends (PEP 578)."""
        sys.addaudithook(self._hook)

    def replacements(self) -> Iterator[Any]:
        """Yield what Python tells no hook of: processes of ``multiprocessing``, however started."""
        start = BaseProcess.start

        def refuse_or_start(process: BaseProcess) -> None:
            if self._is_on and PROGRAMS not in self._allows:
                target = getattr(process, "_target", None)
                self._refuse(PROGRAMS, f"another process ({getattr(target, '__name__', 'run')})")
            start(process)

        yield patch.object(BaseProcess, "start", refuse_or_start)

    def __enter__(self) -> Self:
        self._is_on = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_on = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_on or event[:2] not in ("su", "os", "pt", "so"):
            return
        if event in _PROGRAM_EVENTS and PROGRAMS not in self._allows:
            self._refuse(PROGRAMS, _words(event, args))
        elif event in _NETWORK_EVENTS and NETWORK not in self._allows:
            where = _address(event, args)
            if where is not None:
                self._refuse(NETWORK, where)

    def _refuse(self, kind: str, what: str) -> None:
        line = line_of_caller()
        self._refused[kind, what] = Refused(kind=kind, what=what, source_line=line)
        raise RefusedOutsideError(
            f"{what} is not done while the script is recorded; "
            f"`--allow-outside {kind}` lets it pass"
        )


def _words(event: str, args: tuple[Any, ...]) -> str:
    """Return the command that would be started."""
    if event == "subprocess.Popen":
        words = args[1] if len(args) > 1 and args[1] else args[0]
    elif event in ("os.fork", "os.forkpty"):
        return "another process (os.fork)"
    else:
        words = args[0] if args else event
    if isinstance(words, (list, tuple)):
        return " ".join(map(_text, words))
    return _text(words)


def _text(word: Any) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)


def _address(event: str, args: tuple[Any, ...]) -> str | None:
    """Return the address that would be reached; None for those of this machine."""
    if event == "socket.getaddrinfo":
        host = args[0]
        return None if host is None or _text(host) in _LOCAL else f"a connection to {_text(host)}"
    address = args[1] if len(args) > 1 else None
    if not isinstance(address, tuple) or _text(address[0]) in _LOCAL:
        return None
    return f"a connection to {_text(address[0])}"
