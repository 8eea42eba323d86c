"""The Plan: a tuple of strategies with their settings, saved as YAML."""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from ruamel.yaml import YAML

from memfit.devices.spec import CPU
from memfit.errors import MemfitWarning, PlanFileError, StrategyError, UsageError
from memfit.figures import Prediction
from memfit.files import write_atomically
from memfit.journal.plain_text import read_plain
from memfit.journal.plain_yaml import parsed_yaml
from memfit.journal.plan_words import KnownPlan
from memfit.strategies import CATALOGUE, build_strategy
from memfit.strategies.base import AbstractSplitting, Numerics, Strategy
from memfit.strategies.data_parallel import AbstractDataParallel
from memfit.strategies.evidence import Evidence
from memfit.strategies.facts import JobFacts

_VERSION = 1
_MOST_MODULES = 2_000
"""So many modules are named in a plan's file, which has to be read within a second."""
_OTHERS = "(other modules)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Say how to run a job's step: strategies with their settings."""

    strategies: tuple[Strategy, ...] = ()
    device: str = CPU
    """The device it was made for, by its name in the catalogue."""
    ranks: int | None = None
    """How many ranks carry it out, each on such a device; None leaves that open."""
    numerics: Numerics = Numerics.EXACT
    proof: Evidence | None = None
    """What shows that its pieces keep the results; None where nobody has looked."""
    reasons: Sequence[str] = ()
    """What it was proved or tried with, and while what holds it does."""
    prediction: Prediction | None = None
    ladder: tuple[Plan, ...] = ()
    """Ever smaller plans, to go on with should the step not fit after all."""

    @property
    def splitting(self) -> AbstractSplitting | None:
        """Return the strategy that cuts batches into micro-batches; there is one at most."""
        return splitting_of(self.strategies)

    @property
    def parallel(self) -> AbstractDataParallel | None:
        """Return the strategy by which ranks share the model; there is one at most."""
        return next((s for s in self.strategies if isinstance(s, AbstractDataParallel)), None)

    def stays(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """Return parameters and buffers that are not brought to a GPU with the rest of a model."""
        return [tensor for strategy in self.strategies for tensor in strategy.stays(model)]

    def labels(self) -> tuple[str, ...]:
        """Write the strategies with their settings."""
        return tuple(strategy.label() for strategy in self.strategies)

    def in_words(self) -> KnownPlan:
        """Return what the plan and its ladder are called."""
        ladder = tuple(rung.labels() for rung in self.ladder)
        return KnownPlan(strategies=self.labels(), numerics=str(self.numerics), ladder=ladder)

    def check_for_one_process(self, done: str) -> None:
        """Refuse a plan that several ranks carry out together, where one process is there.

        Raises:
            UsageError: if it is such a plan; ``done`` says what it was to be.
        """
        if self.parallel is not None:
            raise UsageError(
                f"The plan is for {self.ranks or 'several'} ranks, and one process is here, so it "
                f"cannot be {done}. Carry it out with memfit.start under torchrun, which reads "
                "the peak of each rank and says how far it is from the prediction; or take "
                f"{self.parallel.name} out of the plan, for the rest of it alone."
            )

    def checksum(self) -> int:
        """Sum up the strategies with their settings, the same in every process."""
        return zlib.crc32("\n".join(self.labels()).encode())

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Return what the plan claims: what its worst member does to the results of a job.

        Of pieces that cannot be followed that is what a trial has shown when the plan was made.
        """
        worst = worst_numerics(self.strategies, facts)
        if worst is Numerics.UNPROVED and self.proof in (Evidence.PROVED, Evidence.TRIAL):
            return self.numerics
        return worst

    def with_prediction(self, prediction: Prediction) -> Self:
        """Return the same plan with another prediction."""
        return replace(self, prediction=prediction)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        prediction = None if self.prediction is None else self.prediction.to_json()
        return {
            "memfit_plan": _VERSION,
            "device": self.device,
            "ranks": self.ranks,
            "numerics": str(_at_least(self.numerics, self.strategies)),
            "proof": None if self.proof is None else str(self.proof),
            "reasons": list(self.reasons),
            "strategies": _strategies_json(self.strategies),
            "prediction": _plain(_with_largest_modules(prediction)),
            "ladder": [_strategies_json(rung.strategies) for rung in self.ladder],
        }

    def to_yaml(self) -> str:
        """Return the plan as the text of its file."""
        stream = io.StringIO()
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # untyped attribute
        yaml.dump(self.to_json(), stream)
        return stream.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML."""
        write_atomically(Path(path), self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan written by ``save`` or by hand.

        Its prediction and its proof are kept where they are about these strategies, and left out
        where those were changed by hand.

        Raises:
            PlanFileError: if the file is missing, is no plan, or has unknown strategies.
        """
        try:
            content = parsed_yaml(read_plain(Path(path)))
        except OSError as error:
            raise PlanFileError(str(path), error.strerror or "it cannot be opened") from None
        except ValueError as error:
            raise PlanFileError(str(path), f"it is no YAML ({error})") from None
        return cls.from_json(content, str(path))

    @classmethod
    def from_json(cls, content: Any, where: str = "the plan") -> Self:
        """Make a plan of what ``to_json`` gives, without the predictions of smaller plans.

        Raises:
            PlanFileError: if it is no plan, or has unknown strategies or a malformed prediction; it
                names ``where``.
        """
        if not isinstance(content, dict) or content.get("memfit_plan") != _VERSION:
            raise PlanFileError(where, f"it does not say memfit_plan: {_VERSION}")
        try:
            strategies = _strategies(content.get("strategies"))
            ladder = [_strategies(rung) for rung in content.get("ladder") or []]
            numerics = _numerics(content.get("numerics"), strategies, where)
            prediction = _prediction(content.get("prediction"), strategies)
            is_changed = prediction is None and content.get("prediction") is not None
            proof = None if is_changed else content.get("proof") and Evidence(content["proof"])
            reasons = tuple(str(reason) for reason in content.get("reasons") or ())
            ranks = _ranks(content.get("ranks"))
        except (StrategyError, ValueError, KeyError, TypeError) as error:
            raise PlanFileError(where, str(error).rstrip(".")) from None
        device = str(content.get("device", CPU))
        return cls(
            strategies=strategies,
            numerics=numerics,
            device=device,
            ranks=ranks,
            proof=proof,
            reasons=reasons,
            prediction=prediction,
            ladder=tuple(cls(strategies=rung, device=device, ranks=ranks) for rung in ladder),
        )


def splitting_of(strategies: Sequence[Strategy]) -> AbstractSplitting | None:
    """Return the member of a combination that cuts batches into micro-batches, if there is one."""
    return next((s.splitting for s in strategies if s.splitting is not None), None)


def worst_numerics(strategies: Sequence[Strategy], facts: JobFacts) -> Numerics:
    """Return the numerics class of a combination: that of its worst member."""
    classes = (strategy.numerics_for(facts) for strategy in strategies)
    return max(classes, key=lambda numerics: numerics.rank, default=Numerics.EXACT)


def conflict(strategies: Sequence[Strategy]) -> str | None:
    """Name two strategies that cannot be combined; None if all can."""
    rule = clash(strategy.name for strategy in strategies)
    if rule is None:
        return None
    return f"{rule.first} cannot be combined with {rule.second}: {rule.reason}"


def in_catalogue_order(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Sort strategies the way they are shown and applied; what is not in it comes last."""

    def place(strategy: Strategy) -> int:
        kinds = enumerate(CATALOGUE)
        return next((i for i, kind in kinds if isinstance(strategy, kind)), len(CATALOGUE))

    return tuple(sorted(strategies, key=place))


def _with_largest_modules(prediction: dict[str, Any] | None) -> dict[str, Any] | None:
    """Add up the bytes of all but the largest modules, where a model has very many."""
    if prediction is None or len(prediction["by_module"]) <= _MOST_MODULES:
        return prediction
    ordered = sorted(prediction["by_module"].items(), key=lambda entry: -entry[1])
    named, others = ordered[: _MOST_MODULES - 1], ordered[_MOST_MODULES - 1 :]
    by_module = {**dict(named), _OTHERS: sum(num_bytes for _, num_bytes in others)}
    return {**prediction, "by_module": by_module}


def _strategies_json(strategies: Sequence[Strategy]) -> list[dict[str, Any]]:
    return [{"name": strategy.name, **_plain(strategy.settings())} for strategy in strategies]


def _strategies(entries: Any) -> tuple[Strategy, ...]:
    return tuple(_strategy(entry) for entry in entries or [])


def _numerics(said: str | None, strategies: Sequence[Strategy], where: str) -> Numerics:
    """Read what a plan does to the results; its strategies know better where it says too little."""
    claimed = Numerics(said or Numerics.EXACT)
    numerics = _at_least(claimed, strategies)
    if said is not None and numerics is not claimed:
        worst = next(each.name for each in strategies if each.least_numerics is numerics)
        msg = f"{where} says numerics: {said}, and with {worst} the plan is {numerics}."
        warnings.warn(msg, MemfitWarning, stacklevel=4)
    return numerics


def _at_least(claimed: Numerics, strategies: Sequence[Strategy]) -> Numerics:
    """Return what a plan does to the results, where it was made without looking at its job."""
    classes = (claimed, *(each.least_numerics for each in strategies))
    return max(classes, key=lambda each: each.rank)


def _ranks(value: Any) -> int | None:
    """Read a number of ranks."""
    if value is None or (type(value) is int and value > 0):
        return value
    msg = f"ranks must be a whole number of at least 1, not {value!r}"
    raise ValueError(msg)


def _prediction(
    content: Mapping[str, Any] | None, strategies: Sequence[Strategy]
) -> Prediction | None:
    """Read a prediction; None where there is none, or it was made for other strategies."""
    if content is None:
        return None
    try:
        found = Prediction.from_json(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"its prediction is malformed ({type(error).__name__}: {error})"
        raise ValueError(msg) from error
    return found if found.strategies == tuple(each.label() for each in strategies) else None


def _strategy(entry: Mapping[str, Any]) -> Strategy:
    if not isinstance(entry, dict) or "name" not in entry:
        msg = f"a strategy needs a name, found {entry!r}"
        raise ValueError(msg)
    settings = {key: value for key, value in entry.items() if key != "name"}
    return build_strategy(entry["name"], settings)


def _plain(value: Any) -> Any:
    """Turn tuples, mappings and enums into what YAML and JSON can write."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class _Rule:
    """Two strategies that exclude each other, and a clause that says why."""

    first: str
    second: str
    reason: str


def _rules() -> Iterator[_Rule]:
    """Yield what strategies exclude; the one that is shown first is named first."""
    names = [strategy.name for strategy in CATALOGUE]
    for strategy in CATALOGUE:
        for other, reason in strategy.excludes.items():
            first, second = sorted((strategy.name, other), key=names.index)
            yield _Rule(first, second, reason)


RULES: tuple[_Rule, ...] = tuple(_rules())


def clash(names: Iterable[str]) -> _Rule | None:
    """Return the first rule that a combination breaks; None if it breaks none."""
    present = set(names)
    return next((rule for rule in RULES if {rule.first, rule.second} <= present), None)
