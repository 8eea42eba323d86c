"""What the documents say is there: commands, options, make targets, files, headings, names."""

import contextlib
import doctest
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import memfit
from memfit.cli.main import main

ROOT = Path(__file__).parents[2]
SHELL = {"", "sh", "bash", "console", "shell"}
DOCUMENTS = sorted(
    file
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "src/memfit_workloads/**/*.md")
    for file in ROOT.glob(pattern)
)
WITH_EXAMPLES = sorted(
    file for file in (ROOT / "src" / "memfit").rglob("*.py") if ">>> " in file.read_text("utf-8")
)
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix()
)


def blocks(text: str, languages: set[str]) -> Iterator[str]:
    """Yield the fenced blocks in one of the languages."""
    for match in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        if match[2] in languages:
            yield match[3]


def shell_commands(text: str) -> Iterator[str]:
    """Yield the command lines of the shell blocks, and the commands quoted in the text."""
    for block in blocks(text, SHELL):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ ")
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"`((?:memfit|make) [^`]+)`", without_blocks)


def command_words(line: str) -> list[str]:
    """Split a command line into words, up to the first pipe or the next command."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    end = next((i for i, word in enumerate(words) if word in {"|", "&&", "||", ";", ">"}), None)
    return words[:end]


@cache
def help_text(*command: str) -> str | None:
    """Return what ``memfit COMMAND --help`` prints; None where there is no such command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main([*command, "--help"])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return printed.getvalue() if code == 0 else None


def memfit_faults(line: str) -> Iterator[str]:
    """Yield each command and option of a ``memfit`` line that does not exist."""
    words = command_words(line)
    if words[:1] != ["memfit"] or len(words) == 1:
        return
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    for command in own[0].split("|"):
        if command.startswith("-") or not re.fullmatch(r"[a-z-]+", command):
            continue  # `memfit --help`, or a placeholder such as COMMAND
        text = help_text(command)
        if text is None:
            yield f"{line}: there is no command {command}"
            continue
        known = text + (help_text(*own[:2]) or "" if len(own) > 1 else "")
        for word in own[1:]:
            option = word.partition("=")[0]
            if option.startswith("--") and not re.search(rf"{re.escape(option)}\b", known):
                yield f"{line}: memfit {command} has no option {option}"


def make_faults(line: str, makefile: str) -> Iterator[str]:
    """Yield each target of a ``make`` line that does not exist."""
    words = command_words(line)
    if words[:1] == ["make"]:
        words = words[1:]
        if words[:1] == ["-f"]:  # of another file than the one here
            own = ROOT / words[1].strip('"')
            makefile = own.read_text("utf-8") if own.is_file() else ""
            words = words[2:]
        for target in words:
            is_target = re.fullmatch(r"[a-z-]+", target)
            if is_target and not re.search(rf"^{target}:", makefile, re.MULTILINE):
                yield f"{line}: there is no target {target}"


def headings(text: str) -> set[str]:
    """Return the anchors of a document's headings."""
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", without_blocks, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def link_faults(document: Path) -> Iterator[str]:
    """Yield each relative link of a document whose file or heading does not exist."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = document.parent / name if name else document
        if not linked.exists():
            yield f"{target}: there is no such file"
        elif (
            anchor and linked.suffix == ".md" and anchor not in headings(linked.read_text("utf-8"))
        ):
            yield f"{target}: there is no such heading"


@each_document
def test_every_command_in_the_documents_exists(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    commands = list(shell_commands(document.read_text("utf-8")))
    found = [fault for line in commands for fault in memfit_faults(line)]
    found += [fault for line in commands for fault in make_faults(line, makefile)]

    assert not found, "\n".join(found)


@each_document
def test_every_link_in_the_documents_leads_somewhere(document: Path) -> None:
    assert list(link_faults(document)) == []


@each_document
def test_every_python_block_in_the_documents_is_python(document: Path) -> None:
    for block in blocks(document.read_text("utf-8"), {"python", "py"}):
        compile(block, document.name, "exec")


@pytest.mark.parametrize("name", [n for n in memfit.__all__ if not n.startswith("__")])
def test_every_public_name_is_mentioned_in_the_documents(name: str) -> None:
    texts = [file.read_text("utf-8") for file in DOCUMENTS if file.name != "CHANGELOG.md"]

    assert any(re.search(rf"memfit\.{name}\b", text) for text in texts)


def taught_names(text: str) -> set[str]:
    """Return the dotted names of memfit that a text imports or mentions."""
    found = set(re.findall(r"(?<![\w./-])memfit(?:\.\w+)+(?![\w/])", text))
    imports = re.findall(
        r"^ *from (memfit(?:\.\w+)*) import (\([^)]*\)|[^\n#]+)", text, re.MULTILINE
    )
    for module, names in imports:
        words = re.findall(r"\w+(?: as \w+)?", names)
        found |= {f"{module}.{word.partition(' ')[0]}" for word in words}
    homes = {module for module, _ in imports}
    return {name for name in found - homes if not name.endswith((".md", ".py", ".toml", ".io"))}


def is_public(name: str) -> bool:
    """Return whether a dotted name is one of memfit's own or of a package right below it."""
    first, *rest = name.split(".")[1:]
    if first in memfit.__all__:
        return True
    if first == "integrations" and rest:  # a package per framework
        first, rest = f"{first}.{rest[0]}", rest[1:]
    try:
        home = importlib.import_module(f"memfit.{first}")
    except ModuleNotFoundError:
        return False
    known = getattr(home, "__all__", None) or [
        name
        for name, value in vars(home).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == home.__name__
    ]
    return not rest or rest[0] in known


@pytest.mark.parametrize(
    "document",
    [*(d for d in DOCUMENTS if d.name != "CHANGELOG.md"), *(ROOT / "examples").glob("*.py")],
    ids=lambda file: file.relative_to(ROOT).as_posix(),
)
def test_every_name_that_is_taught_is_public(document: Path) -> None:
    names = taught_names(document.read_text("utf-8"))

    assert [name for name in sorted(names) if not is_public(name)] == []


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("```python\nfrom memfit import EnforcedBudget\n```", False),
        ("```python\nfrom memfit.strategies import (\n    Tiling,\n    Bf16,\n)\n```", False),
        ("Catch `memfit.errors.NoPlanFitsError`, or call `memfit.Job.from_file`.", False),
        ("The package `memfit.losses` has them.", False),
        ("```python\nfrom memfit.strategies.tiling import Tiling\n```", True),
        ("```python\nfrom memfit.strategies import Tilings\n```", True),
        ("See `memfit.runtime.run`.", True),
        ("See `memfit.no_such_name`.", True),
    ],
)
def test_a_name_from_a_deep_room_is_refused(text: str, is_refused: bool) -> None:
    assert any(not is_public(name) for name in taught_names(text)) == is_refused


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: file.stem)
def test_examples_in_docstrings_run(file: Path) -> None:
    dotted = file.relative_to(ROOT / "src").with_suffix("").as_posix().replace("/", ".")
    result = doctest.testmod(importlib.import_module(dotted.removesuffix(".__init__")))

    assert result.attempted > 0
    assert result.failed == 0


def test_a_planted_make_target_is_found() -> None:
    commands = list(shell_commands("Run `make nothing`.\n\n```sh\n$ make check  # all\n```\n"))
    found = [fault for line in commands for fault in make_faults(line, "check: stamp\n")]

    assert found == ["make nothing: there is no target nothing"]


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("```sh\nmemfit devices --json\n```", False),
        ("```\n$ memfit devices -- python train.py --no-such-option\n```", False),
        ("Type `memfit --help` first, then `memfit COMMAND --help`.", False),
        ("```sh\nmemfit foretell job.py:job\n```", True),
        ("Type `memfit foretell job.py:job`.", True),
        ("```console\n$ memfit devices \\\n    --no-such-option\n```", True),
        ("```python\nmemfit foretell\n```", False),
    ],
)
def test_a_planted_command_is_refused(text: str, is_refused: bool) -> None:
    found = [fault for line in shell_commands(text) for fault in memfit_faults(line)]

    assert bool(found) == is_refused, found


@pytest.mark.parametrize(
    ("link", "is_refused"),
    [
        ("other.md", False),
        ("other.md#a-heading-with-code", False),
        ("#here", False),
        ("https://example.org/gone", False),
        ("gone.md", True),
        ("other.md#gone", True),
        ("#gone", True),
    ],
)
def test_a_planted_link_is_refused(tmp_path: Path, link: str, is_refused: bool) -> None:
    (tmp_path / "other.md").write_text("# A heading, with `code`\n")
    document = tmp_path / "page.md"
    document.write_text(f"## Here\n\nSee [this]({link}), not `[that](gone.md)`.\n")

    assert bool(list(link_faults(document))) == is_refused
