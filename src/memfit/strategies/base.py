"""What a strategy is: one way to run the same step in less memory."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar, Self, get_origin, get_type_hints

import torch

from memfit.analysis.separability import Separability, not_known
from memfit.devices.spec import CPU
from memfit.errors import StrategyError
from memfit.separation.separation import Separation
from memfit.session.block_names import expand_names
from memfit.session.session import Session
from memfit.strategies.facts import JobFacts
from memfit.trace.events import Category, Phase
from memfit.trace.repetition import FEWEST_PIECES
from memfit.units import MIB

Undo = Callable[[], None]


class Numerics(StrEnum):
    """Say what a strategy does to the results, from harmless to not."""

    EXACT = "exact"
    SAME_IN_LAW = "same-in-law"
    UNPROVED = "unproved"
    APPROXIMATE = "approximate"
    DIFFERENT = "different"

    @property
    def rank(self) -> int:
        """Order the classes: a plan is as bad as its worst strategy."""
        return list(Numerics).index(self)


class Seam(StrEnum):
    """Name a place in a training loop where a strategy takes hold."""

    MODEL = "model"
    """The module, before the first step."""
    FORWARD = "forward"
    """Around forward and loss."""
    OPTIMIZER = "optimizer"
    """The optimizer, before the first step."""
    WINDOW = "window"
    """What happens between two updates: passes over the batch, and the update itself."""
    PROCESS = "process"
    """Before the process starts."""


@dataclass(frozen=True, kw_only=True)
class Strategy(abc.ABC):
    """Change how a step is run. Settings are the fields of the subclass."""

    name: ClassVar[str]
    """The word in commands, plans and docs."""
    numerics: ClassVar[Numerics]
    seams: ClassVar[frozenset[Seam]]
    """Where it takes hold; a loop that does not offer all of them cannot have it."""
    acts_on: ClassVar[Mapping[Category, float]] = {
        Category.SAVED_ACTIVATIONS: 1.0,
        Category.TEMPORARIES: 1.0,
    }
    """The kinds of memory that it can make smaller, each with the largest part that it removes."""
    acts_in: ClassVar[tuple[Phase, ...]] = (Phase.FORWARD, Phase.BACKWARD)
    """The parts of a step whose temporaries it can make smaller."""
    never_faster: ClassVar[bool] = False
    """Whether it can only add time to a step, so that there is no need to try it for speed."""
    costs_little: ClassVar[bool] = False
    """Whether it moves nothing and computes little again, so that a step takes hardly longer."""

    none_offered: ClassVar[str] = "there is nothing in this job that it could act on."
    """What is said, as a sentence, where ``options`` yields nothing."""
    goes_with_shards: ClassVar[bool] = False
    """Whether it was shown to keep the results of models that exchange shards, as under FSDP2."""
    not_with_shards: ClassVar[str] = "it was not shown to keep their results"
    """Why it does not go with such models, as a clause, where it does not."""
    quiet_settings: ClassVar[frozenset[str]] = frozenset()
    """The settings that a label leaves out where they have their defaults."""

    excludes: ClassVar[Mapping[str, str]] = {}
    """Strategies that it cannot be combined with, by name, and a clause that says why."""

    @property
    def needs_card(self) -> bool:
        """Return whether it acts beside a card alone, and is refused where there is none."""
        return False

    @classmethod
    def own_facts(cls, session: Session) -> object | None:
        """Return what it alone has to know of a job's model and optimizer; None for nothing.

        It is found again with ``facts.of(type)``.
        """
        return None

    @classmethod
    def probe(cls) -> AbstractContextManager[Callable[[], object | None]]:
        """Watch a step; return what then gives the facts that only a step shows."""
        return nullcontext(lambda: None)

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Yield the settings that the planner may try, the mildest first."""
        yield cls()

    def obstacle(self, facts: JobFacts) -> str | None:
        """Say in a sentence why the strategy cannot apply to this job; None if it can."""
        return None

    def least_slowdown(self, facts: JobFacts) -> float:
        """Return how many times as long a step takes at least, where that is known beforehand.

        It orders the planner's search until a step has been recorded so.
        """
        return 1.0

    @abc.abstractmethod
    def apply(self, session: Session) -> Undo:
        """Change the session, and return what puts it back. Serves virtual and real runs alike."""

    def stays(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        """Return parameters and buffers that it takes off a GPU, and that need not get there."""
        return ()

    def unsuited(self, facts: JobFacts) -> str | None:
        """Say why it is not for such a job; whether micro-batches keep results is left out."""
        return self.obstacle(facts)

    @property
    def splitting(self) -> AbstractSplitting | None:
        """Return it where it cuts batches into micro-batches."""
        return None

    @property
    def allocator_conf(self) -> str:
        """Return what it has ``PYTORCH_ALLOC_CONF`` say; empty where it leaves that alone."""
        return ""

    @property
    def needs_disk(self) -> bool:
        """Return whether it writes tensors to disk."""
        return False

    @property
    def is_recorded(self) -> bool:
        """Return whether a recorded step shows it: what acts on the process alone does not."""
        return self.seams != {Seam.PROCESS}

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Return what the strategy does to the results of this job."""
        return self.numerics

    @property
    def least_numerics(self) -> Numerics:
        """Return what it does to the results of any job at the least, by its settings alone."""
        return self.numerics

    def check_at_least(self, least: int, *names: str) -> None:
        """Refuse settings that are too small.

        Raises:
            ValueError: if one is.
        """
        for name in names:
            if (value := getattr(self, name)) < least:
                msg = f"{name} must be at least {least}, not {value}"
                raise ValueError(msg)

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)

    def label(self) -> str:
        """Write the strategy with its settings: ``micro-batching(32)``; names where several."""
        usual = {
            each.name: each.default for each in fields(self) if each.name in self.quiet_settings
        }
        texts = {
            key: (" ".join(value) if isinstance(value, (list, tuple)) else str(value))
            for key, value in self.settings().items()
            if key not in usual or value != usual[key]
        }
        texts = {key: text for key, text in texts.items() if text}
        if len(texts) == 1:
            return f"{self.name}({next(iter(texts.values()))})"
        values = ", ".join(f"{key}={text}" for key, text in texts.items())
        return f"{self.name}({values})" if values else self.name

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Build the strategy from plain values.

        Raises:
            StrategyError: if a setting is unknown or missing.
        """
        known = [entry.name for entry in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            reason = (
                f"it has no setting {', '.join(unknown)}; it has: {', '.join(known) or 'none'}."
            )
            raise StrategyError(cls.name, reason)
        types = get_type_hints(cls)
        values = {key: _read(cls.name, key, value, types[key]) for key, value in settings.items()}
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise StrategyError(cls.name, f"{error}.") from None


def _read(strategy: str, key: str, value: Any, wanted: Any) -> Any:
    """Read one setting; a list of words becomes a tuple.

    Raises:
        StrategyError: if it is of another type.
    """
    if get_origin(wanted) is tuple:
        if isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value):
            return tuple(value)
        raise StrategyError(strategy, f"{key} must be a list of words, not {value!r}.")
    if type(value) is not wanted:
        raise StrategyError(strategy, f"{key} must be of type {wanted.__name__}, not {value!r}.")
    return value


@dataclass(frozen=True, kw_only=True)
class AbstractBlockwise(Strategy):
    """Change blocks of a model: those that are named, or all repeated ones of the outermost level.

    A range of numbered siblings is written ``layers.0-11``.
    """

    blocks: tuple[str, ...] = ()

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse blocks that are not there, or that lie inside each other."""
        if not self.blocks and not facts.block_levels:
            return (
                "the model has no repeated blocks (members of a ModuleList or Sequential that "
                "share a class), so name the blocks."
            )
        try:
            names = self.block_names(facts)
        except ValueError as error:
            return f"{error}."
        # In this order what lies inside a block comes right behind it.
        for outer, inner in pairwise(sorted(names, key=lambda name: name.split("."))):
            if inner.startswith(f"{outer}."):
                return f"{inner} lies inside {outer}; name one of the two."
        return None

    def block_names(self, facts: JobFacts) -> list[str]:
        """Return the names of the blocks.

        Raises:
            ValueError: if the model has no such module.
        """
        if not self.blocks:
            return list(facts.block_levels[0])
        return expand_names(self.blocks, facts.module_names)


CHOOSES_TYPE = "both choose the type that forward and loss compute in"
CUTS_BATCH = "both decide how a batch is cut into pieces"


HOST, DISK = "host", "disk"


@dataclass(frozen=True, kw_only=True)
class AbstractOffload(Strategy):
    """Move tensors off the device: to the host beside a GPU, or to disk."""

    to: str = HOST
    min_tensor_bytes: int = MIB

    def __post_init__(self) -> None:
        if self.to not in {HOST, DISK}:
            msg = f"to must be {HOST} or {DISK}, not {self.to!r}"
            raise ValueError(msg)
        self.check_at_least(1, "min_tensor_bytes")

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer the host; on the CPU there is only the disk."""
        yield cls(to=DISK if facts.device_type == CPU else HOST)

    @property
    def needs_disk(self) -> bool:
        """Return whether tensors go to disk."""
        return self.to == DISK

    @property
    def needs_card(self) -> bool:
        """Return whether tensors go to the host, which is the device itself on the CPU."""
        return self.to == HOST

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse the host where it is the device itself."""
        if self.to == HOST and facts.device_type == CPU:
            return (
                "on the cpu the host's memory is the device, so nothing would be saved. "
                "Use to: disk."
            )
        return super().obstacle(facts)

    def label(self) -> str:
        """Write the settings, the smallest size only where it is not the usual one."""
        usual = next(each.default for each in fields(self) if each.name == "min_tensor_bytes")
        return super().label().replace(f", min_tensor_bytes={usual}", "")


@dataclass(frozen=True, kw_only=True)
class AbstractSplitting(Strategy):
    """Run a batch in micro-batches; how their gradients add up is the subclass's matter."""

    micro_batch_size: int

    takes_statistics_as_given: ClassVar[bool] = False
    """Whether batch normalisation gets the statistics of the whole batch."""
    keeps_batch_whole: ClassVar[bool] = False
    """Whether the loss is computed on the whole batch, so that it may couple samples."""
    fewest_pieces: ClassVar[int] = FEWEST_PIECES
    """How many pieces show what all do: two in the middle are alike."""

    def __post_init__(self) -> None:
        self.check_at_least(1, "micro_batch_size")

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Halve the batch until one sample is left."""
        num_samples = facts.batch_size
        while num_samples > 1:
            num_samples = -(-num_samples // 2)
            yield cls(micro_batch_size=num_samples)

    @property
    def splitting(self) -> Self:
        """Return itself."""
        return self

    def with_size(self, micro_batch_size: int) -> Self:
        """Return it with pieces of another size."""
        return replace(self, micro_batch_size=micro_batch_size)

    def keeping(self, num_pieces: int) -> Self | None:
        """Return it with some pieces that are not run again; None if it runs none again."""
        del num_pieces
        return None

    def unsuited(self, facts: JobFacts) -> str | None:
        """Say why the strategy is not for such a job, whatever the size of its pieces."""
        del facts
        return None

    def separability(self, separation: Separation | None) -> Separability:
        """Test whether pieces of this size keep the results; nothing is known without an answer."""
        if separation is None:
            return not_known("whether the step mixes samples was not looked into.")
        return separation.of(self.micro_batch_size, given_statistics=self.takes_statistics_as_given)

    def settle(self, separation: Separation | None, found: Separability) -> None:
        """Keep what a trial has shown of pieces of this size."""
        if separation is not None:
            separation.settled[self.micro_batch_size, self.takes_statistics_as_given] = found

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse steps that mix the samples of different pieces."""
        if reason := self.unsuited(facts):
            return reason
        found = self.separability(facts.separation)
        return found.sentence if found.is_refuted else None

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Pieces draw other random numbers; what could not be followed is unproved."""
        found = self.separability(facts.separation)
        if not found.is_settled:
            return Numerics.UNPROVED
        draws = found.draws or facts.has_dropout or bool(facts.draws_random)
        return Numerics.SAME_IN_LAW if draws else Numerics.EXACT
