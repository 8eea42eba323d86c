"""Shells complete commands, options, devices and files; and the width of a screen makes sense."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from tests.zoo.processes import imports_after

from memfit.cli.main import COMMANDS, main
from memfit.listeners.printable_console import StdoutConsole


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_knows_every_command(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    for name in COMMANDS:
        assert name in script
    assert "a100-40gb" in script


@pytest.mark.slow
def test_torch_stays_out_of_completion():
    pytest.importorskip("shtab")
    code = "from memfit.cli.main import main; main(['--print-completion', 'bash'])"
    assert imports_after(code, "torch", "shtab") == {"shtab"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_devices(tmp_path, capsys):
    pytest.importorskip("shtab")
    main(["--print-completion", "bash"])
    (tmp_path / "memfit.bash").write_text(capsys.readouterr().out)
    ask = "COMP_WORDS=({0}); COMP_CWORD={1}; COMPREPLY=(); _shtab_memfit; echo ${{COMPREPLY[@]}}; "
    asked = [("memfit pred", 1), ("memfit predict --dep", 2), ("memfit predict x --device t4", 4)]
    lines = [ask.format(words, place) for words, place in asked]
    command = f"source memfit.bash; {''.join(lines)}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["predict", "--depth", "t4"]


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 1
    assert "pip install 'memfit[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--print-completion"], ["--print-completion", "cmd"]])
def test_an_unknown_shell_is_refused(words, capsys):
    assert main(words) == 2
    assert "--print-completion" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "width"), [("0", 80), ("nonsense", 80), ("-3", 80), ("7", 80), ("60", 60), ("", 80)]
)
def test_a_width_that_makes_no_sense_is_not_taken(columns, width, monkeypatch):
    def no_terminal(_fd):
        raise OSError

    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    assert StdoutConsole().width == width
