"""The command line: quick help, exit codes, errors in one line, JSON that parses."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tests.zoo.machines import machine_with
from tests.zoo.made_up_machine import healthy
from tests.zoo.processes import imports_after, run_python

import memfit.cli
from memfit.cli.command import write_json
from memfit.cli.main import COMMANDS, load_command, main
from memfit.errors import NoPlanFitsError, UsageError
from memfit.units import GIB


class Probe:
    """Stand in for a command, and do what the test asks."""

    example = "memfit probe --json"

    def __init__(self, action):
        self.action = action

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--number", type=int)
        parser.add_argument("words", nargs="*")

    def run(self, args, console) -> int:
        return self.action(args, console)


@pytest.fixture
def run_probe(monkeypatch):
    """Run ``memfit probe`` with an action in place of the real work."""

    def run(action, *words: str) -> int:
        module = SimpleNamespace(COMMAND=Probe(action))
        monkeypatch.setitem(sys.modules, "memfit.cli.probe", module)
        monkeypatch.setitem(COMMANDS, "probe", "stand in for a command")
        return main(["probe", *words])

    return run


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    monkeypatch.delenv("MEMFIT_DEBUG", raising=False)


def fail_with(error: BaseException):
    def action(_args, _console) -> int:
        raise error

    return action


HELP = "from memfit.cli.main import main; main(['--help'])"


@pytest.mark.parametrize(
    ("code", "imported"),
    [
        (HELP, set()),
        (HELP.replace("--help", "doctor', '--help"), set()),
        (HELP.replace("--help", "devices', '--json"), {"rich"}),
        (f"import numpy\n{HELP}", {"numpy"}),  # the check can fail
    ],
    ids=["help", "help of a command", "devices", "numpy"],
)
def test_torch_stays_out_until_it_is_needed(code, imported):
    assert imports_after(code, "torch", "numpy", "rich") == imported


def test_help_lists_every_command_with_its_summary(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", shown, re.MULTILINE)
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_a_command_that_misses_another_module_says_which(monkeypatch, tmp_path, capsys):
    (tmp_path / "needy.py").write_text("import no_such_package_here\n")
    monkeypatch.setattr(memfit.cli, "__path__", [*memfit.cli.__path__, str(tmp_path)])
    monkeypatch.setitem(COMMANDS, "needy", "need much")
    assert main(["needy"]) == 1
    assert "no_such_package_here" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_an_example_and_refuses_what_it_does_not_know(name, capsys):
    command = load_command(name)
    assert command.example.startswith(f"memfit {name}")
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert (type(command).__doc__ or "no docstring").splitlines()[0] in shown
    assert command.example in shown
    assert "--json" in shown
    assert main([name, "--no-such-option"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "error:" in shown.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "a command is needed"),
        (["devcies"], "did you mean `memfit devices`?"),
        (["zzz"], "`memfit --help` lists them"),
        (["--no-such-option"], "unrecognized arguments"),
        (["plan", "job.py:job", "--bugdet=8GiB"], "--bugdet=8GiB; did you mean --budget?"),
        (["devices", "a100-40gb", "surplus"], "unrecognized arguments"),
        (["devices", "a100-40"], "Nearest: a100-40gb"),
    ],
)
def test_words_that_make_no_sense_give_exit_code_2_and_a_hint(words, expected, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "absent.py:job", "--budget", "8GiB"),
        ("table", "absent.py:job"),
        ("predict", "absent.py", "--device", "t4"),
        ("predict", __file__, "--device", "t44"),
        ("predict", __file__, "--budget", "12Q"),
        ("predict", __file__, "--bugdet", "12GiB"),
    ],
)
def test_wrong_words_are_refused_before_torch_is_imported(words):
    code = "import sys; from memfit.cli.main import main; main(sys.argv[1:]); print(sys.modules)"
    done = run_python("-c", code, *words)
    assert "error: " in done.stderr
    assert "'torch'" not in done.stdout


def test_the_version_is_shown(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"memfit \d\S*\n", capsys.readouterr().out)


def test_the_module_runs_like_the_command():
    done = run_python("-m", "memfit", "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("memfit ")


def test_the_exit_code_of_a_command_is_handed_through(run_probe):
    assert run_probe(lambda _args, _console: 7) == 7


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes", "torch.utils._pytree"])
def test_what_libraries_warn_of_as_they_are_imported_is_not_shown(run_probe, caplog, library):
    def importing(_args, _console) -> int:
        logging.getLogger(library).warning("Failed to load a part for another card")
        return 0

    assert run_probe(importing) == 0
    assert caplog.text == ""


def test_arguments_after_the_command_reach_it(run_probe):
    seen = []

    def look(args, _console) -> int:
        seen.append((args.number, args.words))
        return 0

    run_probe(look, "--number", "3", "word")
    assert seen == [(3, ["word"])]


def test_an_error_made_on_purpose_is_one_line_with_its_own_exit_code(run_probe, capsys):
    assert run_probe(fail_with(UsageError("two\nlines"))) == 2
    assert capsys.readouterr().err == "memfit: error: two lines\n"


def test_no_plan_fits_gives_exit_code_3(run_probe, capsys):
    error = NoPlanFitsError(GIB, 2 * GIB, {"parameters": 2 * GIB}, [])
    assert run_probe(fail_with(error)) == 3
    assert "The smallest peak reached is 2.00 GiB" in capsys.readouterr().err


def test_a_full_disk_that_nobody_foresaw_is_named_as_one(run_probe, capsys, tmp_path):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "file"))
    assert run_probe(fail_with(error)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"memfit: error: No space left on the disk that holds {tmp_path}/file")
    assert shown.count("\n") == 1


def test_an_unexpected_error_is_one_line_that_names_it_and_the_way_on(run_probe, capsys):
    assert run_probe(fail_with(ZeroDivisionError("a bug"))) == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: a bug" in shown
    assert "--debug" in shown
    assert "Traceback" not in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "environment", "is_shown"),
    [
        (["--debug"], {}, True),
        ([], {"MEMFIT_DEBUG": "1"}, True),
        (["--", "--debug"], {}, False),  # it belongs to another program
    ],
)
def test_a_traceback_is_shown_where_it_is_wanted(
    run_probe, capsys, monkeypatch, words, environment, is_shown
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run_probe(fail_with(UsageError("wrong")), *words) == 2
    assert ("Traceback" in capsys.readouterr().err) == is_shown


def test_an_interrupt_gives_exit_code_130_without_words(run_probe, capsys):
    assert run_probe(fail_with(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [["devices"], ["devices", "--json"]], ids=" ".join)
def test_a_reader_that_goes_away_makes_no_noise(words):
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys; from memfit.cli.main import main; sys.exit(main({words}))"
    done = run_python("-c", code, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


def test_json_refuses_numbers_that_json_cannot_say():
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json({"peak_allocated_bytes": float("nan")})


def test_devices_as_json_has_every_device_with_sources(ask):
    devices = ask("devices")["devices"]
    assert {"cpu", "a100-40gb", "h200"} <= {device["name"] for device in devices}
    for device in devices:
        assert device["facts"]["memory_bytes"]["source"]


def test_one_device_as_json_equals_its_entry_in_the_list(ask):
    assert ask("devices", "t4") in ask("devices")["devices"]


def test_the_table_of_devices_fits_80_columns_in_one_line_each(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    a100 = next(line for line in lines if "a100-40gb" in line)
    assert " ".join(a100.split()) == "a100-40gb 39.39 GiB 1,448 GiB/s 19.5 312 312 8.0"


def test_one_device_is_shown_with_whole_sources_dates_and_certainties(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["devices", "h100-80gb"]) == 0
    shown = capsys.readouterr().out
    assert "https://github.com/vllm-project/vllm/issues/27508" in shown
    assert re.search(r"^  table, \d{4}-\d\d-\d\d: ", shown, re.MULTILINE)
    assert re.search(r"matrix_bfloat16_flops_per_second +989.4 TFLOP/s", shown)
    assert re.search(r"launch_seconds +7 us", shown)


@pytest.fixture
def on_machine(monkeypatch, tmp_path):
    """Let the doctor see a machine of the test's making."""

    def choose(**changes) -> None:
        made = healthy(tmp_path)
        made.probe["host"] = machine_with(**changes)
        monkeypatch.setattr("memfit.doctor.this_machine.this_machine", made.machine)

    return choose


def test_the_doctor_is_content_with_a_good_machine(on_machine, ask):
    on_machine()
    report = ask("doctor")
    assert report["ok"] is True
    assert report["host"]["torch_version"] == "2.11.0+cpu"
    assert {"python", "torch", "catalogue", "memory", "disk", "nccl", "nvcc"} <= {
        check["name"] for check in report["checks"]
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_version": None, "torch_problem": "No module named 'torch'"}, "No module named"),
        ({"torch_version": "2.10.1+cu128"}, "needed: 2.11 or newer"),
    ],
)
def test_the_doctor_ends_with_exit_code_1_when_torch_will_not_do(
    changes, expected, on_machine, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    on_machine(**changes)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert expected in shown
    assert shown.splitlines()[-1].startswith("1 problems, ")


def test_the_doctor_shows_what_is_not_applicable_only_when_asked(on_machine, capsys):
    on_machine()
    main(["doctor"])
    assert "flash-attn is not installed" not in capsys.readouterr().out
    main(["doctor", "--all"])
    assert "flash-attn is not installed" in capsys.readouterr().out


def test_options_by_the_thousand_are_refused_at_once(capsys):
    """Argparse would take seconds for five thousand, and most of a minute for twenty thousand."""
    assert main(["devices", *["--json"] * 20_000]) == 2
    assert "20,000 options are given; at most 2,000 are read" in capsys.readouterr().err
    assert main(["devices", *["--jsondevices"] * 1_999]) == 2
    assert len(capsys.readouterr().err.splitlines()[-1]) < 1100


def test_words_of_another_command_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--steps", "1"] * 3_000
    assert main(["run", "--", sys.executable, "-c", "", *arguments]) == 0
