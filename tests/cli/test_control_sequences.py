"""No name, message or file of a user's reaches the terminal as a command to it."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tests.zoo.run_records import CLIMBED, DRIFT, ENDING, FACTS, LEAK, OUT_OF_MEMORY, STEP, UNPROVED

from memfit.cli.main import COMMANDS, main
from memfit.errors import MemfitWarning
from memfit.journal.folder import JournalWriter
from memfit.journal.printable import printable
from memfit.listeners.live_line import LiveLine
from memfit.listeners.printable_console import PrintableConsole

HOSTILE = "a\x1b[2J\x1b]0;owned\x07\x9b31mb\rc\x08\u202ed\u2066e\x00\x7f\u2028\udc80[red]"
ESCAPED = r"a\x1b[2J\x1b]0;owned"


def hostile_like(record: Any) -> Any:
    """Return a record whose texts are hostile."""
    texts = {
        field.name: HOSTILE
        for field in fields(record)
        if type(getattr(record, field.name)) is str and field.name not in {"started_at", "kind"}
    }
    lists = {
        field.name: (HOSTILE,)
        for field in fields(record)
        if isinstance(getattr(record, field.name), tuple) and field.name != "leaks"
    }
    return replace(record, **texts, **lists)


def is_harmless(text: str) -> bool:
    return printable(text) == text


@pytest.mark.parametrize("number", [*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2067, 0xDC80])
def test_each_control_character_is_spelled_out(number):
    sign = chr(number)
    if sign in "\n\t":
        assert printable(sign) == sign
    else:
        assert printable(
            f"a{sign}b"
        ) == f"a{sign.encode('unicode_escape', 'replace').decode()}b" or (
            sign == "\r" and printable("a\rb") == r"a\x0db"
        )


@pytest.mark.parametrize("text", ["plain", "é 日本 ␛ 🙂", "a\nb\tc", ""])
def test_text_that_can_be_seen_stays_as_it_is(text):
    assert printable(text) == text


def test_a_console_lets_through_its_own_controls_alone():
    table = Table("name")
    table.add_row(Text(HOSTILE, style="bold red"))
    shown = []
    for kind in (Console, PrintableConsole):
        out = io.StringIO()
        console = kind(file=out, force_terminal=True, width=200, color_system="standard")
        console.print(table)
        console.print(Text(HOSTILE))
        shown.append(out.getvalue())
    assert "\x1b]0;owned" in shown[0], "rich alone lets it through"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown[1])
    assert is_harmless(plain.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass"))
    assert plain.count(ESCAPED) == 2
    assert "[red]" in plain


def test_square_brackets_in_a_plain_string_are_no_markup():
    out = io.StringIO()
    PrintableConsole(file=out).print("runs/[bold]x[/bold] [link=https://example.org]y[/link]")
    assert out.getvalue() == "runs/[bold]x[/bold] [link=https://example.org]y[/link]\n"


def test_a_live_line_is_harmless():
    out = io.StringIO()
    line = LiveLine(console=PrintableConsole(file=out, width=500))
    line.begin(FACTS)
    for event in (OUT_OF_MEMORY, CLIMBED, DRIFT, LEAK, UNPROVED):
        line.event(hostile_like(event))
    line.end(hostile_like(ENDING))
    assert ESCAPED in out.getvalue()
    assert is_harmless(out.getvalue())


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    writer = JournalWriter(tmp_path)
    writer.begin(hostile_like(FACTS))
    writer.step(STEP)
    for event in (OUT_OF_MEMORY, CLIMBED, DRIFT, LEAK, UNPROVED):
        writer.event(hostile_like(event))
    ending = replace(hostile_like(ENDING), leaks=(hostile_like(LEAK),))
    writer.end(ending)
    return tmp_path


@pytest.mark.slow
def test_the_report_of_a_run_and_its_page_are_harmless(hostile_run, capsys):
    assert main(["report", str(hostile_run)]) == 0
    shown = capsys.readouterr()
    assert ESCAPED in shown.out
    assert is_harmless(shown.out + shown.err)
    page = (hostile_run / "report.html").read_text("utf-8")
    head = page[: page.index("<script")] if "<script" in page else page
    assert ESCAPED in head
    assert is_harmless(head)
    assert main(["report", "--json", "--no-page", str(hostile_run)]) == 0
    assert is_harmless(capsys.readouterr().out)


PLAN = f"strategies:\n- name: {json.dumps(HOSTILE, ensure_ascii=True)}\n"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        [f"--{HOSTILE}"],
        ["--device", HOSTILE, "x.py:job"],
        [f"{HOSTILE}.py:{HOSTILE}"],
        ["plan.yaml", HOSTILE],
        ["x.py:job", "--plan", "plan.yaml"],
        ["--", HOSTILE],
    ],
    ids=range(7),
)
def test_no_command_hands_on_the_words_that_it_was_given(
    command, words, tmp_path, monkeypatch, capsys
):
    if command in {"calibrate", "doctor"} and words[0] in {"--", "--device"}:
        pytest.skip("it would measure this machine")
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(f"raise ValueError({HOSTILE!r})\n")
    Path("plan.yaml").write_text(PLAN)
    main([command, *words])
    shown = capsys.readouterr()
    assert is_harmless(shown.out + shown.err)


def test_warnings_and_tracebacks_are_harmless(tmp_path, monkeypatch, capsys):
    class Probe:
        example = ""

        def add_arguments(self, parser: object) -> None:
            pass

        def run(self, args: object, console: object) -> int:
            warnings.warn(HOSTILE, MemfitWarning, stacklevel=1)
            raise ValueError(HOSTILE)

    monkeypatch.setattr("memfit.cli.main.load_command", lambda _: Probe())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings,
            "showwarning",
            lambda *said: sys.stdout.write(warnings.formatwarning(*said[:4])),
        )
        assert main(["report", "--debug"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count(ESCAPED) >= 1
    assert "Traceback" in shown.err
    assert is_harmless(shown.out + shown.err)
