"""DeepSpeed: which operators came with the package, and which are built when first used.

Source: deepspeed/ops/op_builder/builder.py and git_version_info_installed.py of DeepSpeed 0.19.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine, numbers, read_text
from .packages import Package

# What its optimizers "Adam" and "AdamW" need, on the card and offloaded.
_USUAL_OPERATORS = ("cpu_adam", "fused_adam")


def builds_at_first_use(machine: Machine) -> bool:
    """Return whether DeepSpeed is installed and its usual operators have to be compiled here."""
    package = machine.packages.get("deepspeed")
    if package is None:
        return False
    operators = _assigned(package, "git_version_info_installed.py", "installed_ops")
    return not all(operators.get(name) is True for name in _USUAL_OPERATORS)


def accepts_toolkit(machine: Machine, toolkit: str, built_for: str) -> bool:
    """Return whether DeepSpeed builds with a toolkit of another minor version than torch's."""
    package = machine.packages.get("deepspeed")
    is_told = machine.variables.get("DS_SKIP_CUDA_CHECK") == "1"
    if package is None or is_told or toolkit == built_for:
        return True
    table = _assigned(package, "ops/op_builder/builder.py", "cuda_minor_mismatch_ok")
    if not table:
        return True  # of a version that keeps it elsewhere
    accepted = table.get(numbers(toolkit)[0], ())
    return isinstance(accepted, list | tuple) and {toolkit, built_for} <= set(accepted)


def check_deepspeed(machine: Machine) -> Iterator[Finding]:
    """Check that operators that came with the package were built for this torch."""
    package, torch = machine.packages.get("deepspeed"), machine.torch
    if package is None or torch is None:
        yield not_applicable("deepspeed", "DeepSpeed is not installed")
        return
    operators = _assigned(package, "git_version_info_installed.py", "installed_ops")
    built = sorted(str(name) for name, is_built in operators.items() if is_built is True)
    if not built:
        yield fine("deepspeed", f"{package.version}, which compiles operators when first used")
        return
    about = _assigned(package, "git_version_info_installed.py", "torch_info")
    has = (".".join(map(str, numbers(torch.version)[:2])), torch.cuda or "0.0")
    was = (str(about.get("version")), str(about.get("cuda_version")))
    if was[0] == has[0] and was[1] in {has[1], "None", "0.0"}:
        yield fine("deepspeed", f"{package.version} with built operators: {', '.join(built)}")
        return
    yield Finding(
        name="deepspeed",
        status=Status.PROBLEM,
        found=f"operators built for torch {was[0]} with CUDA {was[1]}: {', '.join(built)}",
        needed=f"operators for torch {has[0]} with CUDA {has[1]}; DeepSpeed refuses others",
        remedy="Install DeepSpeed again, so that it builds for this torch.",
        command=f"pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation "
        f"deepspeed=={package.version}",
    )


def _assigned(package: Package, path: str, name: str) -> dict[object, object]:
    """Read a mapping that a file of the package assigns; empty where it is none."""
    text = read_text(package.folder / "deepspeed" / path)
    found = re.search(rf"^{name}\s*=\s*(\{{.*?\}})\s*$", text, re.MULTILINE | re.DOTALL)
    try:
        value = ast.literal_eval(found[1]) if found else {}
    except (SyntaxError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
