"""The lock, the project file and the Makefile say the same."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def locked_versions() -> dict[str, Version]:
    """Read the lock; every line of it is ``name==version``."""
    lines = (ROOT / "requirements.lock").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    return {
        canonicalize_name(name): Version(version)
        for name, version in (pin.split("==") for pin in pins)
    }


def requirements() -> list[Requirement]:
    """Return every requirement of the project, extras included."""
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(line) for group in (PROJECT["dependencies"], *extras) for line in group]


def test_every_requirement_is_in_the_lock_at_a_version_that_it_allows() -> None:
    locked = locked_versions()

    for requirement in requirements():
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_development_tools_are_pinned_exactly() -> None:
    for line in PROJECT["optional-dependencies"]["dev"]:
        assert "==" in line


def test_torch_is_locked_without_a_build_tag_so_that_any_build_satisfies_it() -> None:
    torch = locked_versions()["torch"]

    assert torch.local is None
    assert torch >= Version("2.11")


def test_the_makefile_installs_only_extras_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = re.findall(r"^(?:RUN|DEV)_EXTRAS := (.+)$", makefile, flags=re.MULTILINE)
    extras = {extra for line in named for extra in line.split(",") if not extra.startswith("$(")}

    assert len(named) == 2
    assert extras <= set(PROJECT["optional-dependencies"])


def test_the_gate_is_make_check_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]

    assert commands[0] == "set -euo pipefail"
    assert commands[1].startswith("cd ")
    assert commands[2:] == ["exec make check"]
