"""The marked blocks of README.md and docs/*.md do what they show.

The words after the language mark a block; blocks of one page share a folder and run in order:

- ``python file=NAME`` is written to that file.
- ``python run`` is executed, ``python run-alone`` in a process of its own.
- ``sh run`` holds ``memfit`` lines, each of which ends with exit code 0.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from memfit.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True, slots=True)
class Block:
    """A marked block: its language, its mark and its text, and where it stands."""

    language: str
    mark: str
    text: str
    page: Path
    line: int


def marked_blocks(page: Path) -> Iterator[Block]:
    """Yield the marked blocks of a page in order."""
    text = page.read_text("utf-8")
    for match in re.finditer(r"^```(\w+) +([^\n]+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(match[1], match[2].strip(), match[3], page, line)


def carry_out(block: Block) -> None:
    """Do what a block's mark says, in the current folder."""
    if block.language == "python" and block.mark.startswith("file="):
        Path(block.mark.removeprefix("file=")).write_text(block.text)
    elif block.language == "python" and block.mark == "run":
        # Empty lines in front, so that a traceback names the line of the page.
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        exec(code, {"__name__": "__main__"})
    elif block.language == "python" and block.mark == "run-alone":
        Path("alone.py").write_text(block.text)
        subprocess.run([sys.executable, "alone.py"], check=True)
    elif block.language == "sh" and block.mark == "run":
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            assert words[:1] in ([], ["memfit"]), f"only memfit lines can be run: {line}"
            assert not words or main(words[1:]) == 0, line
    else:
        pytest.fail(f"{block.page.name}:{block.line}: unknown mark {block.mark!r}")


def carry_out_page(page: Path) -> None:
    """Run the marked blocks of a page in order."""
    for block in marked_blocks(page):
        carry_out(block)


PAGES_WITH_BLOCKS = [page for page in PAGES if any(marked_blocks(page))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder that is the current one and importable; its modules are forgotten after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=lambda page: page.name)
def test_marked_blocks_run(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    carry_out_page(page)

    # Figures of the job of the page stand in what its commands have shown.
    shown, text = capsys.readouterr().out, " ".join(page.read_text("utf-8").split())
    peaks = re.findall(r"[Tt]he (?:plain step|plan)(?: of this job)? takes ([\d.]+ MiB)", text)
    assert all(peak in shown for peak in peaks), shown


def test_the_readme_has_a_block_that_runs() -> None:
    marks = {(block.language, block.mark) for block in marked_blocks(ROOT / "README.md")}

    assert {("python", "file=job.py"), ("python", "run"), ("sh", "run")} <= marks


@pytest.mark.parametrize(
    "text",
    [
        "```python run\nassert 1 == 2\n```\n",
        "```python run\nimport job_of_nobody\n```\n",
        "```sh run\nmemfit devices --no-such-option\n```\n",
        "```sh run\nls\n```\n",
    ],
)
def test_a_planted_block_that_fails_is_found(folder: Path, text: str) -> None:
    page = folder / "page.md"
    page.write_text(text)

    with pytest.raises((AssertionError, ModuleNotFoundError)):
        carry_out_page(page)


def test_an_unmarked_block_is_left_alone(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("```python\nassert 1 == 2\n```\n")

    assert list(marked_blocks(page)) == []
