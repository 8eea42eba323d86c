"""Writes the file of a job."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.script.job_file.facts import SeenOptimizer, SeenScript
from memfit.script.job_file.loop import TrainingLoop
from memfit.script.job_file.loss import Loss
from memfit.script.job_file.names import (
    BUILTINS,
    calls_in,
    read,
    read_by_all,
    root_of,
    text_of,
    written,
    written_by_all,
)
from memfit.script.job_file.prelude import Prelude, without_unread

_OWN = ("job", "drawn", "batches", "build_model", "compute_loss", "make_optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The parts of a script, and what is known of it."""

    loop: TrainingLoop
    prelude: Prelude
    loss: Loss
    seen: SeenScript
    arguments: Sequence[str]


def job_text(cut: Cut, output: Path) -> str:
    """Write a job file.

    Args:
        cut: what it is made of.
        output: where it will lie; modules are found from there.

    Raises:
        NoJobError: if a part of the script cannot be written down.
    """
    used = written_by_all([*cut.prelude.setup, *cut.prelude.model]) | set(cut.loss.batch_names)
    taken = used & set(_OWN)
    if taken:
        raise cut.loop.refuse(
            None, f"it has a name of its own that a job file needs: {min(taken)}", "Rename it."
        )
    clip = _clip(cut)
    scheduler = _scheduler(cut)
    parts = [
        _model_function(cut),
        _batches_function(cut),
        _loss_function(cut),
        _optimizer_function(cut.seen.optimizer),
        *([scheduler[0]] if scheduler else []),
        _job(cut, clip),
        _main(cut, scheduler),
    ]
    text = "\n\n\n".join([_setup(cut, read_by_all(ast.parse("\n".join(parts)).body)), *parts])
    return f"{_docstring(cut)}\n\n{_imports(cut, text, output)}\n\n{text}\n"


def _docstring(cut: Cut) -> str:
    loop = cut.loop
    words = " ".join(["python", loop.script.name, *cut.arguments])
    notes = "".join(
        textwrap.fill(f"- {note}", 96, subsequent_indent="  ") + "\n" for note in cut.seen.notes
    )
    return (
        f'"""The training step of {loop.script.name} (line {loop.loop.lineno}) as a memfit.Job.\n\n'
        f"Written by `memfit job` from `{words}`; it is yours to change.\n"
        f"{notes}"
        '"""'
    )


def _imports(cut: Cut, text: str, output: Path) -> str:
    loop = cut.loop
    needed = _free_names(text)
    lines = ["import sys", "from itertools import islice", "from pathlib import Path", ""]
    lines += ["import memfit"]
    if not loop.is_guarded:
        return "\n".join(lines)
    names = sorted(needed & _names_of_file(loop.tree))
    folder = os.path.relpath(loop.script.resolve().parent, output.resolve().parent)
    if folder != ".":
        lines += ["", f"sys.path.insert(0, str(Path(__file__).resolve().parent / {folder!r}))"]
    wide = textwrap.fill(
        f"from {loop.script.stem} import ({', '.join(names)})", 96, subsequent_indent="    "
    )
    return "\n".join([*lines, *([wide] if names else [])])


def _free_names(text: str) -> set[str]:
    """Return the names that a text reads without having bound them at its top."""
    tree = ast.parse(text)
    globals_ = {
        name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
    }
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    rest = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    found = read_by_all(rest)
    for function in functions:
        inside = written_by_all(function.body) - globals_
        own = {each.arg for each in function.args.args}
        # Python keeps all names that a function binds to the function.
        found |= read_by_all(function.body) - (inside & written_by_all(function.body)) - own
    bound_first: set[str] = set()
    for node in rest:
        bound_first |= written(node) - (read(node) - bound_first)
    return found - bound_first - BUILTINS - {node.name for node in functions}


def _names_of_file(tree: ast.Module) -> set[str]:
    """Return what can be imported from a file."""
    return written_by_all([node for node in tree.body if not _is_main_guard(node)]) | {
        name for node in tree.body if isinstance(node, (ast.If, ast.Try)) for name in written(node)
    }


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _setup(cut: Cut, used: set[str]) -> str:
    """Write what the script does before its loop.

    Args:
        cut: the script's parts.
        used: names that the rest of the file reads.
    """
    statements = cut.prelude.setup
    if cut.loop.is_guarded:  # others may look into their own globals
        statements = without_unread(statements, used)
    texts = [
        _statement_text(each, cut.loop.source)
        for each in statements
        if not (isinstance(each, ast.ImportFrom) and each.module == "__future__")
    ]
    arguments = [cut.loop.script.name, *cut.arguments]
    head = (
        "# What the script does before its loop, but for model and optimizer; prints to stderr.\n"
        f"_kept, sys.argv, sys.stdout = (sys.argv, sys.stdout), {arguments!r}, sys.stderr"
    )
    return "\n".join([head, *texts, "sys.argv, sys.stdout = _kept"])


def _statement_text(statement: ast.stmt, source: str) -> str:
    """Write a statement; what was made here, not read, is written from its tree."""
    if isinstance(statement, ast.Assign) and not hasattr(statement.targets[0], "end_lineno"):
        return ast.unparse(statement)
    lines = source.splitlines()
    first = lines[statement.lineno - 1]
    if ast.unparse(statement).partition("\n")[0].split("(")[0].strip()[:1] not in first:
        return ast.unparse(statement)
    return text_of(statement, source)


def _indented(lines: Sequence[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


def _model_function(cut: Cut) -> str:
    source = cut.loop.source
    statements = [_statement_text(each, source) for each in cut.prelude.model]
    return f"def build_model():\n{_indented([*statements, f'return {cut.seen.model}'])}"


def _batches_function(cut: Cut) -> str:
    """Write what yields the script's batches."""
    loss, source = cut.loss, cut.loop.source
    names = ", ".join(loss.batch_names)
    if loss.header is not None:
        head = f"for {ast.unparse(loss.header.target)} in {ast.unparse(loss.header.iter)}:"
        inside = [f"yield {names}"]
        if loss.is_endless:
            head, inside = "while True:", [head, _indented(inside)]
    else:
        head = "while True:"
        inside = [*(_statement_text(each, source) for each in loss.fetch), f"yield {names}"]
    doc = f'"""Yield the batches of line {cut.loop.loop.lineno}."""'
    return f"def batches():\n{_indented([doc, head, _indented(inside)])}"


def _loss_function(cut: Cut) -> str:
    loss, seen = cut.loss, cut.seen
    lines = []
    single = len(loss.batch_names) == 1
    argument = loss.batch_names[0] if single else "batch"
    if not single:
        lines.append(f"{', '.join(loss.batch_names)} = batch")
    used = read_by_all([*loss.statements, loss.value])
    for name, kind in sorted(seen.devices.items()):
        if name in used:
            suffix = ".type" if kind == "text" else ""
            lines.append(f"{name} = next({seen.model}.parameters()).device{suffix}")
    lines += [_statement_text(each, cut.loop.source) for each in loss.statements]
    value = ast.unparse(loss.value)
    if seen.loss_factor != 1:
        lines.append(f"# {seen.num_backwards} of these add up in one update of the script.")
        value = f"{seen.loss_factor} * ({value})"
    lines.append(f"return {value}")
    return f"def compute_loss({seen.model}, {argument}):\n{_indented(lines)}"


def _optimizer_function(optimizer: SeenOptimizer) -> str:
    common = {
        key: value
        for key, value in optimizer.groups[0].settings.items()
        if all(group.settings.get(key) == value for group in optimizer.groups)
    }
    settings = "".join(f", {key}={value!r}" for key, value in common.items())
    module, _, _ = optimizer.module.rpartition(".")
    home = "torch.optim" if optimizer.module.startswith("torch.optim") else optimizer.module
    lines = []
    if home not in ("__main__", "<run_path>") and module != "__main__":
        lines.append(f"from {home} import {optimizer.name}\n")
    if len(optimizer.groups) == 1:
        condition = optimizer.groups[0].condition
        chosen = f"[p for name, p in named_parameters if {condition}]"
        given = chosen if condition else "[p for _, p in named_parameters]"
        lines.append(f"return {optimizer.name}({given}{settings})")
    else:
        lines += ["named = list(named_parameters)", "groups = ["]
        for group in optimizer.groups:
            own = "".join(
                f", {key!r}: {value!r}"
                for key, value in group.settings.items()
                if key not in common
            )
            where = f" if {group.condition}" if group.condition else ""
            lines.append(f"    {{'params': [p for name, p in named{where}]{own}}},")
        lines += ["]", f"return {optimizer.name}(groups{settings})"]
    return f"def make_optimizer(named_parameters):\n{_indented(lines)}"


def _clip(cut: Cut) -> str:
    """Return the norm that gradients are clipped to, as the script writes it; empty for none.

    Raises:
        NoJobError: if gradients are changed in another way.
    """
    loop, seen = cut.loop, cut.seen
    for call in calls_in(loop.whole, "clip_grad_value_"):
        if call.lineno in seen.lines:
            raise loop.refuse(call, "a job clips the norm of gradients, not their values")
    for node in ast.walk(loop.whole):
        if isinstance(node, ast.Attribute) and node.attr == "grad" and node.lineno in seen.lines:
            raise loop.refuse(node, "the loop changes or reads gradients")
    calls = [call for call in calls_in(loop.whole, "clip_grad_norm_") if call.lineno in seen.lines]
    if not calls:
        return ""
    call = calls[0]
    named = {each.arg: each.value for each in call.keywords}
    given = call.args[1] if len(call.args) > 1 else named.get("max_norm")
    first = call.args[0] if call.args else None
    whole = isinstance(first, ast.Call) and not first.args and root_of(first) in seen.modules
    if len(calls) > 1 or given is None or not whole or set(named) - {"max_norm"}:
        raise loop.refuse(call, "a job clips the norm of all gradients at once, in one call")
    if read(given) & (cut.prelude.changing | cut.prelude.tainted | written(loop.whole)):
        raise loop.refuse(call, "the norm that it clips to changes from step to step")
    return ast.unparse(given)


def _scheduler(cut: Cut) -> tuple[str, str] | None:
    """Write what makes the scheduler: its function and its name."""
    loop = cut.loop
    for statement in cut.prelude.of_model:
        names = written(statement) & cut.seen.schedulers
        if not (isinstance(statement, ast.Assign) and len(names) == 1):
            continue
        others = read(statement) & cut.prelude.tainted
        steps = [
            call
            for call in calls_in(loop.loop, "step")
            if root_of(call.func) in names and not call.args
        ]
        if len(others) != 1 or not steps:
            continue
        name = next(iter(names))
        lines = [_statement_text(statement, loop.source), f"return {name}"]
        return f"def make_scheduler({next(iter(others))}):\n{_indented(lines)}", name
    return None


def _job(cut: Cut, clip: str) -> str:
    seen = cut.seen
    window = f", window={seen.num_backwards}" if seen.num_backwards > 1 else ""
    padding = f", padding={seen.padding!r}" if seen.padding else ""
    size = str(seen.micro_batch_size)
    if seen.num_backwards > 1:
        size = f"{seen.num_backwards} * {seen.micro_batch_size}"
    lines = [
        f"drawn = memfit.DrawnBatches(batches{window}{padding})",
        "job = memfit.Job(",
        "    model=build_model,",
        "    batch=drawn.of_size,  # the first that the script sees; give its largest",
        "    loss=compute_loss,",
        "    optimizer=make_optimizer,",
        f"    batch_size={size},",
        *([f"    clip_grad_norm={clip},"] if clip else []),
        f"    name={re.sub(r'[^a-z0-9]+', '-', cut.loop.script.stem.lower())!r},",
        ")",
    ]
    return "\n".join(lines)


def _main(cut: Cut, scheduler: tuple[str, str] | None) -> str:
    lines = [
        "num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else None",
        "plan = memfit.Plan.load('plan.yaml') if Path('plan.yaml').exists() else None",
        "with memfit.start(job, plan) as run:",
    ]
    if scheduler:
        lines.append(f"    {scheduler[1]} = make_scheduler(run.optimizer)")
    lines += [
        "    for number, batch in enumerate(islice(drawn.windows(), num_steps), 1):",
        "        result = run.step(batch)",
    ]
    if scheduler:
        lines.append(f"        {scheduler[1]}.step()")
    lines.append("        print(f'step {number}: loss {float(result.loss):.4f}')")
    left = left_out_lines(cut)
    if left:
        lines.append("        # Left out of the script's loop; what you need of it goes here:")
        lines += [f"        #   line {number}: {text}" for number, text in left]
    return f"if __name__ == '__main__':\n{_indented(lines)}"


def left_out_lines(cut: Cut) -> Sequence[tuple[int, str]]:
    """Return what of the script's loop the job file does not do: lines and their text."""
    scheduler = _scheduler(cut)
    source = cut.loop.source.splitlines()
    own = f"{scheduler[1]}.step()" if scheduler else ""
    found = [(each.lineno, source[each.lineno - 1].strip()) for each in cut.loss.left_out]
    return [(line, text) for line, text in found if text != own]
