"""When a recording is given up before its end, and what is said of one that fails."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from memfit.errors import StrategyError
from memfit.planner.search.candidates import Strategies
from memfit.planner.search.patience import Patience

_OPERATORS_BETWEEN_LOOKS = 256


class GivenUpError(BaseException):
    """A recording that is not worth its end; no code that is recorded is to catch it."""


class TooLongError(StrategyError):
    """A combination was not recorded, or not to its end, because that takes too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingLimits:
    """Give up a recording that is too long, or that has begun when time was over.

    Its operators are what it takes in memory as well.
    """

    most_operators: float = float("inf")
    """Of all steps that are recorded at a time."""
    patience: Patience = field(default_factory=Patience)

    def look(self, num_operators: int) -> None:
        """Look whether to go on after so many operators.

        Raises:
            GivenUpError: with the reason, if not.
        """
        if num_operators > self.most_operators:
            limit = f"{self.most_operators:,.0f}"
            msg = (
                f"recording it takes more than {limit} operators; --thorough does so all the same."
            )
            raise GivenUpError(msg)
        if num_operators % _OPERATORS_BETWEEN_LOOKS == 0 and self.patience.is_over_for_good:
            msg = "the time was over before it was recorded."
            raise GivenUpError(msg)


def failure_of(error: Exception) -> str:
    """Quote an error's first line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"the step could not be recorded with it ({said.rstrip('.')})."


@contextmanager
def failure_named(strategies: Strategies, known: Collection[str]) -> Iterator[None]:
    """Turn whatever recording raises into a refusal: as it is, the job could be recorded.

    What was never recorded before is at fault; a combination is where nothing in it is new, and
    only it is refused then, as is one that is given up.

    Args:
        strategies: what is recorded inside.
        known: the names of strategies that were recorded before.

    Raises:
        StrategyError: if recording fails.
    """
    try:
        yield
    except (StrategyError, MemoryError):
        raise
    except GivenUpError as error:
        labels = " + ".join(strategy.label() for strategy in strategies)
        raise TooLongError(labels, str(error)) from None
    except Exception as error:
        names = dict.fromkeys(strategy.name for strategy in strategies)
        new = [name for name in names if name not in known]
        raise StrategyError(" + ".join(new or names), failure_of(error)) from error
