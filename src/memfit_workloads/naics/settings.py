"""What the flags and files of ``memfit train naics`` mean, as data. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit_workloads import flags
from memfit_workloads.memory_settings import MemorySettings, SystemSettings

from .config import CONF, DEFAULT, read_config, read_stages
from .sampling import Stage

CACHED = "cached-gradients"
PADDINGS = ("max_length", "longest")
_DEMO_STAGES = ("01", "05")
_HALF = 0.5
_DEMO = {"training.trainer.max_steps": 4}
_PRESETS = ("cpu", "document")


@dataclass(frozen=True, slots=True, kw_only=True)
class NaicsSettings(SystemSettings):
    """What a run is told."""

    config: Mapping[str, Any]
    """config.yaml with all that was laid over it."""
    stages: tuple[Stage, ...]
    output_dir: Path
    is_demo: bool = False
    has_baselines: bool = True
    resume: bool = False

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Return a name for each stage; one that comes again has a number."""
        names = [stage.name for stage in self.stages]
        counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
        return tuple(
            name if count == 1 else f"{name}_{count}"
            for name, count in zip(names, counts, strict=True)
        )

    def of(self, path: str) -> Any:
        """Return a setting by its path, such as ``loss.temperature``."""
        found: Any = self.config
        for name in path.split("."):
            found = found[name]
        return found


def settings_of(args: argparse.Namespace, command: str) -> NaicsSettings:
    """Turn parsed flags and the files that they name into settings.

    Raises:
        UsageError: if nothing says what is to be trained, or a setting makes no sense.
        DataError: if a file cannot be read.
    """
    names = args.stage or (_DEMO_STAGES if args.demo and args.chain is None else ())
    if not names and args.chain is None:
        msg = "Say what to train: --stage 01 (repeated for several), --chain FILE, or --demo."
        raise UsageError(msg)
    path = args.config_path or DEFAULT
    on_cpu = (args.preset or ("document" if args.config_path else "cpu")) == "cpu"
    given = [
        *([f"{name}={value}" for name, value in _DEMO.items()] if args.demo else ()),
        *args.given,
    ]
    config = read_config(path, on_cpu=on_cpu, given=given)
    _check(config)
    folder = CONF if args.config_path is None else path.parent
    return NaicsSettings(
        config=config,
        stages=tuple(read_stages(names, args.chain, folder)),
        output_dir=args.output_dir,
        is_demo=args.demo,
        has_baselines=not args.no_baselines,
        resume=args.resume,
        memory_settings=_memory(args),
        overwrite=args.overwrite,
        command=command,
    )


def _memory(args: argparse.Namespace) -> MemorySettings:
    """Have a plan cut by cached gradients where a budget asks for one."""
    memory = MemorySettings.from_flags(args)
    if memory.plan_file is not None:
        return memory
    if args.demo and memory.budget_bytes is None and memory.budget_fraction is None:
        memory = replace(memory, budget_fraction=_HALF)
    has_budget = memory.budget_bytes is not None or memory.budget_fraction is not None
    if not has_budget or args.any_strategy:
        return memory
    return replace(memory, require=(CACHED,), allow=(*memory.allow, CACHED))


def _check(config: Mapping[str, Any]) -> None:
    """Refuse settings that nothing can be made of.

    Raises:
        UsageError: with what was found and what is needed.
    """
    loader, model, loss = config["data_loader"], config["model"], config["loss"]
    wrong = [
        (loader["tokenization"]["padding"] not in PADDINGS, "data_loader.tokenization.padding",
         loader["tokenization"]["padding"], " or ".join(PADDINGS)),
        (loader["negatives"] not in ("own", "shared"), "data_loader.negatives",
         loader["negatives"], "own or shared"),
        (loss["kind"] not in ("dcl", "info_nce"), "loss.kind", loss["kind"], "dcl or info_nce"),
        (not loss["curvature"] > 0, "loss.curvature", loss["curvature"], "a number above 0"),
        (not loss["temperature"] > 0, "loss.temperature", loss["temperature"], "a number above 0"),
        (model["moe"]["top_k"] > model["moe"]["num_experts"], "model.moe.top_k",
         model["moe"]["top_k"], f"at most {model['moe']['num_experts']} experts"),
    ]  # fmt: skip
    for is_wrong, name, found, needed in wrong:
        if is_wrong:
            msg = f"{name} is {found}; needed is {needed}. Change it in config.yaml or by --set."
            raise UsageError(msg)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is trained, and the flags."""
    parser.add_argument(
        "--stage",
        action="append",
        default=[],
        metavar="NN",
        help="a stage of the curriculum, 01 to 05; repeated, one after the other in one run",
    )
    parser.add_argument("--chain", type=Path, metavar="FILE", help="a file that lists stages")
    parser.add_argument(
        "--demo",
        action="store_true",
        help="stages 01 and 05 in a few steps, inside half of the unplanned peak",
    )
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config-path",
        type=Path,
        metavar="FILE",
        help="config.yaml; the folders curriculum and text_curriculum lie beside it; default: the "
        "one that comes with memfit",
    )
    group.add_argument(
        "--preset",
        choices=_PRESETS,
        help="cpu lays conf/cpu.yaml over the configuration, short texts and few steps: the "
        "default without --config-path",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="given",
        help="a setting of config.yaml, such as data_loader.batch_size=64; may be repeated",
    )
    _add_memory_and_outputs(parser)


def _add_memory_and_outputs(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory")
    flags.add_memory_flags(memory)
    memory.add_argument(
        "--any-strategy",
        action="store_true",
        help="let the planner do without cached gradients",
    )
    outputs = parser.add_argument_group("outputs")
    outputs.add_argument("-o", "--output-dir", type=Path, default=Path("runs/naics"), metavar="DIR")
    outputs.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --output-dir, at the update that its last checkpoint was "
        "written after",
    )
    outputs.add_argument("--overwrite", action="store_true", help="replace the run in --output-dir")
    outputs.add_argument(
        "--no-baselines", action="store_true", help="leave out the table of what needs no training"
    )
