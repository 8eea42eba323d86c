"""Reads pickles of plain data and nothing else: nothing that a file says can be run.

A snapshot consists of dictionaries, lists, tuples, texts and numbers, so its pickle needs no
opcode that names, calls or builds anything (checked with ``pickletools`` in the tests). Python's
own unpickler can be told to refuse names, but two doors stay open in it: an index of its memo makes
it set aside sixteen bytes for every smaller one (2**32 of them for five bytes of a file), and a
nested tuple as a dictionary's key is hashed without end or until the stack overflows. Here the few
opcodes are carried out one by one, and whatever is not among them is refused by its name.

Source of the opcodes: ``pickletools`` of Python 3.11 to 3.14, protocols 0 to 5.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import NamedTuple

Plain = object
"""None, bool, int, float, str, bytes, and lists, tuples and dictionaries with texts as keys."""

_BYTES_PER_CONTAINER = 8
_BYTES_PER_KEPT = 4
_LEAST_CONTAINERS = 1000
_MOST_MARKS = 1000
_MOST_INT_BYTES = 16
_MOST_DIGITS = 40
_NAMES = {ord(each.code): each.name for each in pickletools.opcodes}


class PlainPickleError(ValueError):
    """Say what in a pickle is no plain data, and where."""


class _Memo(dict[int, Plain]):
    """What a pickle has kept, by its index."""

    def __missing__(self, index: int) -> Plain:
        msg = f"it asks for what it never kept (memo {index})"
        raise PlainPickleError(msg)


class _Machine:
    """The stack, the marks and the memo of one pickle that is being read."""

    __slots__ = ("data", "marks", "memo", "most_kept", "num_containers", "position", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Plain] = []
        self.marks: list[int] = []
        self.memo = _Memo()
        # Each takes tens of bytes of memory for one of the file; real snapshots have one in twenty.
        self.num_containers = _LEAST_CONTAINERS + len(data) // _BYTES_PER_CONTAINER
        self.most_kept = _LEAST_CONTAINERS + len(data) // _BYTES_PER_KEPT

    def take(self, num_bytes: int) -> bytes:
        """Read so many bytes of the file; none are set aside before they are there."""
        begin = self.position
        self.position = end = begin + num_bytes
        if num_bytes < 0 or end > len(self.data):
            left = f"{len(self.data) - begin:,} are left"
            msg = f"it is cut off or damaged: {num_bytes:,} bytes are announced where {left}"
            raise PlainPickleError(msg)
        return self.data[begin:end]

    def line(self) -> str:
        """Read a line of protocol 0, without its end."""
        end = self.data.find(b"\n", self.position, self.position + _MOST_DIGITS)
        if end < 0:
            msg = f"a number of protocol 0 has more than {_MOST_DIGITS} digits"
            raise PlainPickleError(msg)
        text = self.data[self.position : end].decode("ascii")
        self.position = end + 1
        return text

    def popped(self) -> list[Plain]:
        """Take everything above the last mark off the stack."""
        begin = self.marks.pop()
        values = self.stack[begin:]
        del self.stack[begin:]
        return values

    def push_container(self, value: Plain) -> None:
        """Push a list, a tuple or a dictionary, of which there may only be so many."""
        self.num_containers -= 1
        if self.num_containers < 0:
            msg = (
                f"it makes more than one container for {_BYTES_PER_CONTAINER} of its "
                f"{len(self.data):,} bytes, far more than any snapshot"
            )
            raise PlainPickleError(msg)
        self.stack.append(value)


def loads_plain(data: bytes) -> Plain:
    """Read a pickle of plain data; what follows its end is ignored.

    Memory stays within about thirty times the bytes of the file, and time is linear in them.

    Raises:
        PlainPickleError: if it names, calls or builds anything, is cut off, or is no pickle.
    """
    machine = _Machine(data)
    run = _CARRIED_OUT
    try:
        while True:
            code = data[machine.position]
            machine.position += 1
            if code == _STOP:
                return machine.stack.pop()
            run[code](machine)
    except KeyError:
        raise PlainPickleError(_refusal(data, machine.position - 1)) from None
    except (IndexError, struct.error):
        where = "it is cut off" if machine.position >= len(data) else "it takes what is not there"
        msg = f"{where} (byte {machine.position:,} of {len(data):,})"
        raise PlainPickleError(msg) from None
    except (UnicodeDecodeError, TypeError, AttributeError, OverflowError) as error:
        msg = f"byte {machine.position:,} makes no sense ({type(error).__name__})"
        raise PlainPickleError(msg) from None


def _refusal(data: bytes, position: int) -> str:
    code = data[position]
    if code not in _NAMES:
        return f"byte {position:,} ({code:#04x}) is no pickle's"
    reason = "which no snapshot needs"
    if _NAMES[code] in {"GLOBAL", "INST"}:
        words = data[position + 1 : position + 200].split(b"\n")[:2]
        name = ".".join(word.decode("ascii", "replace") for word in words)
        reason = f"which would import {name}; no snapshot needs that"
    return f"byte {position:,} is the opcode {_NAMES[code]}, {reason}"


def _counted(format_text: str, *, is_text: bool) -> Callable[[_Machine], None]:
    """Make the reader of a text or of bytes behind its length."""
    layout = struct.Struct(format_text)

    def read(machine: _Machine) -> None:
        (num_bytes,) = layout.unpack(machine.take(layout.size))
        content = machine.take(num_bytes)
        machine.stack.append(content.decode("utf-8", "surrogatepass") if is_text else content)

    return read


def _number(format_text: str) -> Callable[[_Machine], None]:
    """Make the reader of a number of fixed length."""
    layout = struct.Struct(format_text)

    def read(machine: _Machine) -> None:
        position = machine.position
        machine.position = position + layout.size
        machine.stack.append(layout.unpack_from(machine.data, position)[0])

    return read


def _indexed(format_text: str | None, *, puts: bool) -> Callable[[_Machine], None]:
    """Make what puts into the memo, or gets from it, at an index."""
    layout = None if format_text is None else struct.Struct(format_text)

    def run(machine: _Machine) -> None:
        if layout is None:
            index = _whole(machine.line())
        else:
            position = machine.position
            machine.position = position + layout.size
            (index,) = layout.unpack_from(machine.data, position)
        if puts:
            machine.memo[index] = machine.stack[-1]
        else:
            machine.stack.append(machine.memo[index])

    return run


def _short_get(machine: _Machine) -> None:
    """Carry out BINGET, by far the most frequent opcode."""
    index = machine.data[machine.position]
    machine.position += 1
    machine.stack.append(machine.memo[index])


def _passed_over(num_bytes: int) -> Callable[[_Machine], None]:
    def run(machine: _Machine) -> None:
        machine.take(num_bytes)

    return run


def _constant(value: Plain) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _last(count: int) -> Callable[[_Machine], None]:
    """Make the opcode that takes so many values off the stack and pushes their tuple."""

    def run(machine: _Machine) -> None:
        if len(machine.stack) < count:
            raise IndexError
        values = tuple(machine.stack[len(machine.stack) - count :])
        del machine.stack[len(machine.stack) - count :]
        machine.push_container(values)

    return run


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _list_on_top(machine).append(value)


def _appends(machine: _Machine) -> None:
    values = machine.popped()
    _list_on_top(machine).extend(values)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _fill(_dictionary_on_top(machine), [key, value])


def _set_items(machine: _Machine) -> None:
    values = machine.popped()
    _fill(_dictionary_on_top(machine), values)


def _list_on_top(machine: _Machine) -> list[Plain]:
    target = machine.stack[-1]
    if not isinstance(target, list):
        raise PlainPickleError(_misfit(machine, target, "list"))
    return target


def _dictionary_on_top(machine: _Machine) -> dict[str, Plain]:
    target = machine.stack[-1]
    if not isinstance(target, dict):
        raise PlainPickleError(_misfit(machine, target, "dictionary"))
    return target


def _misfit(machine: _Machine, target: Plain, kind: str) -> str:
    return f"byte {machine.position:,} fills a {type(target).__name__} as if it were a {kind}"


def _fill(target: dict[str, Plain], values: list[Plain]) -> None:
    keys = values[::2]
    if len(values) % 2 or any(type(key) is not str for key in keys):
        found = next((type(key).__name__ for key in keys if type(key) is not str), "no value")
        msg = f"a dictionary has {found} where a text is its key; snapshots have texts alone"
        raise PlainPickleError(msg)
    target.update(zip(keys, values[1::2], strict=True))  # type: ignore[arg-type]  # seen above


def _dictionary(machine: _Machine) -> None:
    made: dict[str, Plain] = {}
    _fill(made, machine.popped())
    machine.push_container(made)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        msg = f"{text!r} is no whole number"
        raise PlainPickleError(msg) from None


def _text_int(machine: _Machine) -> None:
    text = machine.line().removesuffix("L")
    machine.stack.append(
        {"00": False, "01": True}.get(text) if text in {"00", "01"} else _whole(text)
    )


def _text_float(machine: _Machine) -> None:
    try:
        machine.stack.append(float(machine.line()))
    except ValueError as error:
        raise PlainPickleError(str(error)) from None


def _text_line(machine: _Machine) -> None:
    """Carry out UNICODE of protocol 0: a line in raw-unicode-escape."""
    end = machine.data.find(b"\n", machine.position)
    if end < 0:
        raise IndexError
    machine.stack.append(machine.data[machine.position : end].decode("raw-unicode-escape"))
    machine.position = end + 1


def _long_int(machine: _Machine) -> None:
    num_bytes = machine.take(1)[0]
    if num_bytes > _MOST_INT_BYTES:
        msg = f"byte {machine.position:,} is an integer of {num_bytes} bytes; addresses have eight"
        raise PlainPickleError(msg)
    machine.stack.append(int.from_bytes(machine.take(num_bytes), "little", signed=True))


def _memoize(machine: _Machine) -> None:
    index = len(machine.memo)
    if index > machine.most_kept:
        msg = f"it keeps more than one value for {_BYTES_PER_KEPT} of its bytes"
        raise PlainPickleError(msg)
    machine.memo[index] = machine.stack[-1]


def _mark(machine: _Machine) -> None:
    if len(machine.marks) == _MOST_MARKS:
        msg = f"it opens {_MOST_MARKS:,} containers inside one another"
        raise PlainPickleError(msg)
    machine.marks.append(len(machine.stack))


class _Opcode(NamedTuple):
    name: str
    run: Callable[[_Machine], None]


_STOP = ord(".")
_OPCODES = (
    _Opcode("PROTO", _passed_over(1)),
    _Opcode("FRAME", _passed_over(8)),
    _Opcode("MARK", _mark),
    _Opcode("EMPTY_DICT", lambda machine: machine.push_container({})),
    _Opcode("EMPTY_LIST", lambda machine: machine.push_container([])),
    _Opcode("EMPTY_TUPLE", _constant(())),
    _Opcode("DICT", _dictionary),
    _Opcode("LIST", lambda machine: machine.push_container(machine.popped())),
    _Opcode("TUPLE", lambda machine: machine.push_container(tuple(machine.popped()))),
    _Opcode("TUPLE1", _last(1)),
    _Opcode("TUPLE2", _last(2)),
    _Opcode("TUPLE3", _last(3)),
    _Opcode("APPEND", _append),
    _Opcode("APPENDS", _appends),
    _Opcode("SETITEM", _set_item),
    _Opcode("SETITEMS", _set_items),
    _Opcode("NONE", _constant(None)),
    _Opcode("NEWTRUE", _constant(True)),
    _Opcode("NEWFALSE", _constant(False)),
    _Opcode("INT", _text_int),
    _Opcode("LONG", _text_int),
    _Opcode("FLOAT", _text_float),
    _Opcode("UNICODE", _text_line),
    _Opcode("BININT", _number("<i")),
    _Opcode("BININT1", _number("<B")),
    _Opcode("BININT2", _number("<H")),
    _Opcode("LONG1", _long_int),
    _Opcode("BINFLOAT", _number(">d")),
    _Opcode("SHORT_BINUNICODE", _counted("<B", is_text=True)),
    _Opcode("BINUNICODE", _counted("<I", is_text=True)),
    _Opcode("BINUNICODE8", _counted("<Q", is_text=True)),
    _Opcode("SHORT_BINBYTES", _counted("<B", is_text=False)),
    _Opcode("BINBYTES", _counted("<I", is_text=False)),
    _Opcode("MEMOIZE", _memoize),
    _Opcode("PUT", _indexed(None, puts=True)),
    _Opcode("BINPUT", _indexed("<B", puts=True)),
    _Opcode("LONG_BINPUT", _indexed("<I", puts=True)),
    _Opcode("GET", _indexed(None, puts=False)),
    _Opcode("BINGET", _short_get),
    _Opcode("LONG_BINGET", _indexed("<I", puts=False)),
)
_CODES = {each.name: ord(each.code) for each in pickletools.opcodes}
_CARRIED_OUT = {_CODES[opcode.name]: opcode.run for opcode in _OPCODES}
