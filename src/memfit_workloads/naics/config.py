"""Reads the configuration: config.yaml, what differs on a CPU, and the curriculum's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from memfit.errors import DataError, UsageError
from memfit.journal.plain_text import read_plain
from memfit.journal.plain_yaml import parsed_yaml

from .sampling import Stage

CONF = Path(__file__).parent / "conf"
DEFAULT, CPU = CONF / "config.yaml", CONF / "cpu.yaml"
FOLDERS = ("curriculum", "text_curriculum")
_LISTS = tuple(each.name for each in fields(Stage) if "tuple" in str(each.type))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose content is a mapping.

    Raises:
        DataError: if there is no such file, or it holds something else.
    """
    if not path.is_file():
        reason = "there is no such file. `memfit train naics --help` names the flags that take one."
        raise DataError(str(path), reason)
    try:
        content = parsed_yaml(read_plain(path))
    except ValueError as error:
        reason = f"it is no YAML ({error}). Correct it there."
        raise DataError(str(path), reason) from None
    if not isinstance(content, dict):
        reason = f"it holds a {type(content).__name__}; needed is a mapping of names to settings."
        raise DataError(str(path), reason)
    return content


def read_config(path: Path, *, on_cpu: bool, given: Sequence[str]) -> dict[str, Any]:
    """Read config.yaml, lay the settings of a CPU over it, and then what was given.

    Args:
        path: of config.yaml.
        on_cpu: whether conf/cpu.yaml is laid over it.
        given: ``a.b=value``, each a setting that config.yaml has.

    Raises:
        UsageError: if a setting is unknown.
    """
    config = _laid_over(read_yaml(DEFAULT), read_yaml(path))
    if on_cpu:
        config = _laid_over(config, read_yaml(CPU))
    for text in given:
        _set(config, text)
    return config


def _laid_over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(lower)
    for name, value in upper.items():
        below = found.get(name)
        both = isinstance(value, dict) and isinstance(below, dict)
        found[name] = _laid_over(below, value) if both and isinstance(below, dict) else value
    return found


def _set(config: dict[str, Any], text: str) -> None:
    """Set ``a.b=value`` in a configuration.

    Raises:
        UsageError: if it is no such text, or the configuration has no such name.
    """
    path, equals, value = text.partition("=")
    *folders, name = path.split(".")
    place: Any = config
    for folder in folders:
        place = place.get(folder) if isinstance(place, dict) else None
    if not equals or not isinstance(place, dict) or name not in place:
        there = ", ".join(place) if isinstance(place, dict) else ", ".join(config)
        msg = f"--set {text!r} names no setting. Write NAME.NAME=VALUE; there are: {there}."
        raise UsageError(msg)
    try:
        place[name] = parsed_yaml(value)
    except ValueError as error:
        msg = f"--set {text!r}: the value is no YAML ({error})."
        raise UsageError(msg) from None


def read_stages(names: Sequence[str], chain: Path | None, folder: Path) -> list[Stage]:
    """Read the stages of a run, in their order.

    Args:
        names: such as ``01``, ``01_stage`` or ``01_text``.
        chain: a chain file, or None.
        folder: that holds ``curriculum`` and ``text_curriculum``.

    Raises:
        UsageError: if a stage is missing, or two files of a name say different things.
    """
    stages = [_stage(name, folder) for name in names]
    for entry in read_yaml(chain)["stages"] if chain is not None else ():
        found = _stage(str(entry["name"]), folder)
        stages.append(
            replace(
                found,
                max_epochs=entry.get("max_epochs"),
                learning_rate=entry.get("learning_rate"),
            )
        )
    return stages


def _stage(name: str, folder: Path) -> Stage:
    patterns = [name] if "_" in name else [f"{name}_stage", f"{name}_text"]
    found = [
        path
        for pattern in patterns
        for kind in FOLDERS
        if (path := folder / kind / f"{pattern}.yaml").is_file()
    ]
    if not found:
        there = sorted(path.stem for kind in FOLDERS for path in (folder / kind).glob("0*.yaml"))
        msg = f"There is no stage {name!r} in {folder}. There are: {', '.join(there) or 'none'}."
        raise UsageError(msg)
    stages = [_read_stage(path) for path in found]
    if any(replace(each, name="") != replace(stages[0], name="") for each in stages[1:]):
        msg = (
            f"Stage {name!r} is written in {' and '.join(map(str, found))}; they differ, so one of "
            f"them would be of no effect. Make them agree, or name one: --stage {found[0].stem}."
        )
        raise UsageError(msg)
    return stages[0]


def _read_stage(path: Path) -> Stage:
    content = read_yaml(path)
    content = {**content, **content.pop("curriculum", {})}  # as some write it
    known = {each.name for each in fields(Stage)}
    unknown = [name for name in content if name not in known]
    if unknown:
        reason = f"a stage has no {unknown[0]}. There are: {', '.join(sorted(known))}."
        raise DataError(str(path), reason)
    lists: dict[str, Any] = {
        name: tuple(content[name]) for name in _LISTS if content.get(name) is not None
    }
    plain = {name: value for name, value in content.items() if name not in _LISTS}
    return Stage(**plain, **lists)
