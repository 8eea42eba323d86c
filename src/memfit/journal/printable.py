"""Shows text from outside so that a terminal or a page takes none of it for a command.

Names of modules, files and errors come from people and their libraries. A control character in one
could move the cursor, colour the screen, set the window's title or turn the following text around.
"""

from __future__ import annotations

_KEPT = frozenset(map(ord, "\n\t"))
_UNSEEN = {
    *range(0x20),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, 0xFEFF),
    *range(0x202A, 0x202F),
    *range(0x2060, 0x2070),
    *range(0xD800, 0xE000),
    *range(0xE0000, 0xE0080),
}
"""Controls of ASCII (C0) and of ISO 8859 (C1), of the direction of writing, marks without a width,
ends of lines that terminals do not know, halves of characters, and invisible tags."""


def _escaped(number: int) -> str:
    for most, form in ((0xFF, "\\x{:02x}"), (0xFFFF, "\\u{:04x}")):
        if number <= most:
            return form.format(number)
    return f"\\U{number:08x}"


_ESCAPES = {number: _escaped(number) for number in _UNSEEN - _KEPT}


def printable(text: str) -> str:
    r"""Write characters that cannot be seen, or that command a terminal, as ``\x1b`` is written."""
    return text if text.isascii() and text.isprintable() else text.translate(_ESCAPES)
