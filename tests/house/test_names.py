"""Names say what a thing is, and in which unit; only units.py spells what a GiB is.

Unit rule: a dataclass field or a parameter is never called ``memory``, ``size`` or ``time`` alone;
it ends in ``_bytes`` (int), ``_seconds`` (float) or ``_fraction`` (float), never in ``_gb``, ``_ms``
or ``_percent``.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A bag of assorted things has no name of its own.
BAGS = {"util", "utils", "common", "misc", "manager", "managers", "helper", "helpers", "stuff"}
# A quantity whose unit the reader would have to guess.
UNITLESS = {
    "mem", "memory", "size", "time", "ram", "vram", "duration", "elapsed", "latency", "bandwidth",
}  # fmt: skip
# Each quantity has one unit inside: bytes, seconds, and fractions from 0 to 1. `_ns` alone stays
# for instants, which are exact integers as the clocks give them.
OTHER_UNITS = re.compile(
    r"_(kb|mb|gb|tb|kib|mib|gib|tib|ms|us|millis|minutes|mins|hours|percent|pct)$"
)
UNIT_TYPES = {"bytes": "int", "seconds": "float", "fraction": "float"}
UNITS_FILE = "src/memfit/units.py"

_GUIDE = "src/memfit_workloads/reference_estimate.py: suggest_configurations"
EXCEPTIONS: dict[str, str] = {
    f"{_GUIDE}(available_memory_gb): the units inside are bytes, seconds and fractions": (
        "the guide's own function, which scripts call by this name"
    ),
}


def words(name: str) -> set[str]:
    """Split a CamelCase or snake_case name into its words, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def fields_and_parameters(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield ``(owner, name, annotation)`` of dataclass fields and function parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and is_dataclass(node):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield node.name, statement.target.id, ast.unparse(statement.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                yield node.name, each.arg, ast.unparse(each.annotation) if each.annotation else ""


def unit_faults(tree: ast.AST) -> Iterator[str]:
    """Yield each quantity whose name or type leaves its unit open."""
    for owner, name, annotation in fields_and_parameters(tree):
        unit = name.rpartition("_")[2]
        expected = UNIT_TYPES.get(unit)
        if name.lstrip("_") in UNITLESS:
            yield f"{owner}({name}): name its unit, as in num_bytes or step_seconds"
        elif OTHER_UNITS.search(name):
            yield f"{owner}({name}): the units inside are bytes, seconds and fractions"
        elif expected and annotation in {"int", "float"} and annotation != expected:
            yield f"{owner}({name}): {annotation}, but {unit} are kept as {expected}"


def bag_faults(path: str, tree: ast.AST) -> Iterator[str]:
    """Yield each module, package or class named like a bag."""
    for part in Path(path).with_suffix("").parts:
        if words(part) & BAGS:
            yield f"{part}: say what it holds"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and words(node.name) & BAGS:
            yield f"class {node.name}: say what it does"


def constant(node: ast.expr) -> object:
    """Evaluate an expression made of number literals alone; None for anything else."""
    if any(isinstance(part, ast.Name | ast.Call | ast.Attribute) for part in ast.walk(node)):
        return None
    try:
        return eval(compile(ast.Expression(node), "<constant>", "eval"))  # noqa: S307 - literals
    except (TypeError, ValueError, ArithmeticError):
        return None


def gib_faults(path: str, tree: ast.AST) -> Iterator[str]:
    """Yield each place outside units.py that spells MiB, GiB or TiB as a number."""
    if path == UNITS_FILE:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.BinOp) and constant(node) in {2**20, 2**30, 2**40}:
            yield f"line {node.lineno}: take {ast.unparse(node)} from memfit.units"


def faults(path: str, source: str) -> list[str]:
    """Find every name in a file that breaks a rule."""
    tree = ast.parse(source)
    found = [*bag_faults(path, tree), *unit_faults(tree), *gib_faults(path, tree)]
    return [f"{path}: {fault}" for fault in found if f"{path}: {fault}" not in EXCEPTIONS]


def test_names_in_the_sources_say_what_and_in_which_unit() -> None:
    found = [
        fault
        for file in sorted((ROOT / "src").rglob("*.py"))
        for fault in faults(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    ]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("src/memfit/utils.py", ""),
        ("src/memfit/common/names.py", ""),
        ("src/memfit/a.py", "class PlanManager: ..."),
        ("src/memfit/a.py", "def f(memory): ..."),
        ("src/memfit/a.py", "def f(*, size: int): ..."),
        ("src/memfit/a.py", "def f(limit_gb: int): ..."),
        ("src/memfit/a.py", "def f(timeout_ms: float): ..."),
        ("src/memfit/a.py", "def f(peak_bytes: float): ..."),
        ("src/memfit/a.py", "@dataclass(frozen=True)\nclass A:\n    time: float"),
        ("src/memfit/a.py", "@dataclass\nclass A:\n    step_seconds: int"),
        ("src/memfit/a.py", "PAGE_BYTES = 4 * 1024**2"),
        ("src/memfit/a.py", "limit_bytes = 1 << 30"),
        ("src/memfit/a.py", "limit_bytes = 1073741824"),
    ],
)
def test_a_planted_name_is_refused(path: str, source: str) -> None:
    assert len(faults(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("src/memfit/a.py", "def f(batch_size: int, peak_bytes: int, step_seconds: float): ..."),
        ("src/memfit/a.py", "def f(link_bytes_per_second: float, budget_fraction: float): ..."),
        ("src/memfit/a.py", "def f(num_bytes: int | float): ..."),
        ("src/memfit/a.py", "class Managed:\n    time: float = 1.0"),
        ("src/memfit/a.py", "NUM_ROWS = 1024 * 3"),
        (UNITS_FILE, "GIB = 1024**3"),
    ],
)
def test_a_good_name_passes(path: str, source: str) -> None:
    assert faults(path, source) == []
