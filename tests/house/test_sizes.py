"""Functions stay within 80 lines and files within 700, docstrings not counted."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "examples", "benchmarks")
FUNCTION_LINES = 80
FILE_LINES = 700

# What may be longer, and why: "path" for a file, "path:function" for a function.
EXCEPTIONS: dict[str, str] = {}
# Folders whose files may be of any size, and why.
FREE_FOLDERS: dict[str, str] = {
    "benchmarks/scripts": "training scripts as strangers write them, whose form is the point",
}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function's body, from its first statement after the docstring."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def oversized(path: str, source: str) -> Iterator[tuple[str, int]]:
    """Yield what is too long in a file, with its lines."""
    num_lines = len(source.splitlines())
    if num_lines > FILE_LINES:
        yield path, num_lines
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = body_lines(node)
            if num_lines > FUNCTION_LINES:
                yield f"{path}:{node.name}", num_lines


@cache
def oversized_in(root: Path) -> dict[str, int]:
    """Find everything too long below a root."""
    free = [root / folder for folder in FREE_FOLDERS]
    return {
        key: num_lines
        for folder in FOLDERS
        for file in sorted((root / folder).rglob("*.py"))
        if not any(file.is_relative_to(folder) for folder in free)
        for key, num_lines in oversized(file.relative_to(root).as_posix(), file.read_text("utf-8"))
    }


def test_functions_and_files_stay_within_their_lines() -> None:
    found = {key: lines for key, lines in oversized_in(ROOT).items() if key not in EXCEPTIONS}

    assert not found, f"split these, or name them in EXCEPTIONS with a reason: {found}"


def test_every_exception_is_still_needed_and_has_a_reason() -> None:
    reasons = [*EXCEPTIONS.values(), *FREE_FOLDERS.values()]

    files = {key.partition(":")[0] for key in EXCEPTIONS}
    found = {key for path in files for key, _ in oversized(path, (ROOT / path).read_text("utf-8"))}

    assert set(EXCEPTIONS) <= found
    assert all((ROOT / folder).is_dir() for folder in FREE_FOLDERS)
    assert all(len(reason.split()) >= 4 for reason in reasons)


@pytest.mark.parametrize(
    ("path", "num_statements", "is_refused"),
    [
        ("src/memfit/planted.py", FUNCTION_LINES, False),
        ("src/memfit/planted.py", FUNCTION_LINES + 1, True),
        ("tests/planner/test_planted.py", FUNCTION_LINES + 1, True),
        ("benchmarks/planted.py", FUNCTION_LINES + 1, True),
        ("benchmarks/scripts/planted.py", FUNCTION_LINES + 1, False),
    ],
)
def test_a_function_is_refused_from_one_line_above_the_limit(
    tmp_path: Path, path: str, num_statements: int, is_refused: bool
) -> None:
    body = "".join(f"    a{i} = {i}\n" for i in range(num_statements))
    planted = tmp_path / path
    planted.parent.mkdir(parents=True)
    planted.write_text(f'def long():\n    """Say it.\n\n    In several lines.\n    """\n{body}')

    assert oversized_in(tmp_path) == ({f"{path}:long": num_statements} if is_refused else {})


def test_a_file_is_refused_from_one_line_above_the_limit() -> None:
    assert not list(oversized("a.py", "a = 1\n" * FILE_LINES))
    assert list(oversized("a.py", "a = 1\n" * (FILE_LINES + 1))) == [("a.py", FILE_LINES + 1)]
