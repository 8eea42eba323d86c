"""The error tree. Each class takes facts and writes its own sentence and remedy.

MemfitError
├── UsageError                  words of a command that make no sense (exit code 2)
├── JobError                    what the user brought cannot be used
│   ├── JobFileError            FILE.py is missing or fails while it is imported
│   ├── JobNameError            FILE.py has no such job
│   ├── JobNeededError          FILE.py:name gives no job, where a function for a step is not enough
│   ├── StepBuilderError        FILE.py:name is a function that builds no step
│   ├── JobFunctionError        model, batch, loss or optimizer fails or has the wrong signature
│   ├── LossNotScalarError      the loss is no scalar
│   ├── WeightsNotHereError     weights to be trained are kept elsewhere, where nothing trains them
│   ├── HeldTensorError         a tensor of a living model cannot be replaced while it is looked at
│   ├── BatchSizeIgnoredError   batch(n) gives the same tensors for every n
│   ├── CoupledSamplesError     samples of a batch have no gradients of their own
│   └── OtherScanError          a folder holds another influence scan than the one to go on with
├── UnknownDeviceError          no such device in the catalogue (exit code 2)
│   └── AmbiguousDeviceError    a name that may mean devices of other memory or speed
├── DeviceUnavailableError      the device is not in this machine
├── StrategyError               a strategy that is unknown, badly set or cannot apply
├── NoSmallerPlanError          nothing smaller to go on with keeps the results; the guard says so
├── PlanFileError               a plan file that cannot be read
├── ConfigFileError             a configuration file that cannot be read or changed
├── NoExactFactorsError         no micro-batch and accumulation give the effective batch (exit 3)
├── UndoError                   an applied plan that cannot be taken back
├── RecordingError              the step cannot be recorded virtually
│   └── OpaqueTensorError       a tensor subclass does not say what it is made of
├── OutOfMemoryAfterAllError    a step ran out of memory under every plan there is (exit code 4)
├── UpdateCutError              memory ran out in an update that cannot be undone (exit code 4)
├── NotSeparableError           gradients of a batch depend on how it is cut (exit code 6)
│   └── BatchConditionError     a batch breaks what a plan's proof takes for granted
├── NotPutBackError             a step that failed reaches what cannot be put back (exit code 4)
├── BatchChangedError           a step that failed changes its batch, and cannot be done over (4)
├── LostContextError            nothing more can be done on the card in this process (exit code 5)
├── OtherRankError              another rank has failed or died
├── CheckpointError             a checkpoint in shards cannot be written or read
├── NoPlanFitsError             no plan keeps the step inside the budget (exit code 3)
├── PeakAboveBudgetError        a training has taken more than its budget (exit code 3)
├── PromiseBrokenError          a plan keeps less of the results than it claims
├── NothingToVerifyError        a plan would leave the batch of a trial as it is
├── TooLargeToVerifyError       not even a few samples can be run here
├── CommandNotStartedError      a command to be watched does not exist or cannot be executed
├── MissingExtraError           an optional package is not installed
├── FullDiskError               the disk has no room for a file; an OSError as well
└── DataError                   a data file or checkpoint is missing or malformed
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from memfit.units import format_bytes

_MOST_NAME_CHARACTERS = 80


class MemfitError(Exception):
    """Be the root of every error that memfit raises on purpose."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Let other processes have it: what its class was made with is in its attributes."""
        return _remade, (type(self), self.args, vars(self))


def _remade(kind: type[MemfitError], args: tuple[Any, ...], attributes: Any) -> MemfitError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


class MemfitWarning(UserWarning):
    """Warn of something that grows or drifts while a run goes on."""


class UsageError(MemfitError):
    """Refuse words of a command that make no sense."""

    exit_code = 2


class JobError(MemfitError):
    """Say that what the user brought cannot be used."""


class JobFileError(JobError):
    """Say which job file could not be loaded, and why."""

    def __init__(self, path: str, reason: str, remedy: str = "") -> None:
        remedy = remedy or "Give it as FILE.py:name, where name is a memfit.Job in that file."
        super().__init__(f"Cannot load the job file {path}: {reason}. {remedy}")


class JobNameError(JobError):
    """Say which job name was not found, and which there are."""

    def __init__(self, path: str, name: str, found: Sequence[str]) -> None:
        there = "No memfit.Job is seen in it; `memfit job FILE.py` writes one from a script"
        if found:
            there = f"The jobs there: {', '.join(found)}"
        wrong = f"has no memfit.Job named {name!r}" if name else "does not say which job is meant"
        super().__init__(f"{path} {wrong}. {there}. Name one as FILE.py:name.")


class JobNeededError(JobError):
    """Say that a function gives no job, what a job has that a step has not, and what writes one."""

    def __init__(self, name: str, reason: str) -> None:
        file = name.partition(":")[0]
        super().__init__(
            f"{name} {reason}, and a memfit.Job is needed, or a function that gives one: to run a "
            "step in other ways, or with other batch sizes, memfit must have its parts. A Job has "
            "model, batch, loss and optimizer, as functions, and batch_size, the effective batch "
            f"that every plan keeps. `memfit job {file}` writes one from a script. "
            f"`memfit predict {name}` takes a function that builds a step as it is."
        )


class StepBuilderError(JobError):
    """Say why a function cannot be used as one that builds everything and gives a step."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"{name} cannot be used: {reason}. Needed is a memfit.Job, or a function without "
            "arguments that builds model, optimizer and batch and returns a function without "
            "arguments that does one training step."
        )


class JobFunctionError(JobError):
    """Say which of the job's functions failed, and what it should look like where that is why.

    Args:
        function: its name.
        expected: its signature; empty where that is not what is wrong.
        reason: what was found.
        remedy: what to do about it.
    """

    def __init__(self, function: str, expected: str, reason: str, remedy: str = "") -> None:
        self.function = function
        self.expected = expected
        self.reason = reason
        told = f"The job's {function} failed: {reason}."
        needed = f"Expected {function}: {expected}." if expected else ""
        super().__init__(" ".join(filter(None, (told, needed, remedy))))


class LossNotScalarError(JobError):
    """Say what the loss returned instead of a scalar."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"The job's loss returned {found}; needed is a scalar tensor, the mean over the batch, "
            "or memfit.Total(sum, count). Reduce it, for example with .mean()."
        )


class WeightsNotHereError(JobError):
    """Say which weights would silently stay untrained, and what to do."""

    def __init__(self, names: Sequence[str], *, is_dispatched: bool) -> None:
        self.names = tuple(names)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        why = (
            "accelerate brings them in for forward alone, as its device map says cpu or disk"
            if is_dispatched
            else "they lie on the meta device, which holds no values"
        )
        super().__init__(
            f"{len(names)} of the model's weights require gradients and would never be trained "
            f"({shown}): {why}. Build the model with all weights on one device (no device_map, or "
            "model.to_empty() and load_state_dict()) and let memfit make the step fit, for example "
            "with activation-offload; or freeze these weights with requires_grad_(False)."
        )


class HeldTensorError(JobError):
    """Say which tensor of a living model nothing can stand in for, and what to do."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(
            f"The job's functions return objects that already live, and {name or 'one tensor'} of "
            f"them cannot be replaced while memfit looks at the step: {reason}. Ask outside of "
            "autocast and of other code that holds on to it, or let the job's functions build "
            "model and optimizer anew."
        )


class BatchSizeIgnoredError(JobError):
    """Say that the batch function does not follow its argument."""

    def __init__(self, sizes: tuple[int, int], shapes: str) -> None:
        super().__init__(
            f"The job's batch function ignores its argument: batch({sizes[0]}) and "
            f"batch({sizes[1]}) both give {shapes}. It must return tensors with one dimension "
            "that grows with the batch size."
        )


class CoupledSamplesError(JobError):
    """Say why samples have no gradients of their own, and what is needed."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(
            f"The samples of a batch have no gradients of their own: {reason}. {remedy}."
        )


class OtherScanError(JobError):
    """Say in which way the scan in a folder is another one."""

    def __init__(self, folder: str, difference: str) -> None:
        super().__init__(
            f"{folder} holds another scan: {difference}. Give another folder, or remove this one "
            "to begin anew."
        )


class UnknownDeviceError(MemfitError):
    """Say which device is unknown, with the nearest names, or why it is left out on purpose."""

    exit_code = 2

    def __init__(self, name: str, known: Iterable[str], why: str | None = None) -> None:
        shown = repr(name if len(name) <= _MOST_NAME_CHARACTERS else f"{name[:60]}...")
        if why is not None:
            super().__init__(f"{shown} is no device of memfit. {why}.")
            return
        typed = "-".join(name[:_MOST_NAME_CHARACTERS].lower().split())
        near = get_close_matches(typed, sorted(known), n=3, cutoff=0.4)
        hint = f"Nearest: {', '.join(near)}. " if near else ""
        super().__init__(
            f"No device named {shown}. {hint}`memfit devices` lists all; for a card that is not "
            "among them, `memfit devices --new FILE.toml` writes a file that --device takes."
        )


class AmbiguousDeviceError(UnknownDeviceError):
    """Say which devices a name may mean, with the memory of each."""

    def __init__(self, name: str, variants: Mapping[str, int]) -> None:
        self.variants = tuple(variants)
        shown = [f"{each} ({format_bytes(size)})" for each, size in variants.items()]
        MemfitError.__init__(
            self, f"{name!r} may mean {' or '.join(shown)}. Name the one that is meant."
        )


class DeviceUnavailableError(MemfitError):
    """Say that the device is not in this machine."""

    def __init__(self, name: str, found: str) -> None:
        super().__init__(
            f"{name} is not in this machine ({found}). Measure with --device cpu, or predict "
            "without the device: `memfit predict --device NAME`, with a name from `memfit devices`."
        )


class StrategyError(MemfitError):
    """Say which strategy cannot be used, and why."""

    def __init__(self, name: str, reason: str) -> None:
        self.strategy = name
        self.reason = reason
        super().__init__(f"Strategy {name!r} cannot be used: {reason}")


class NoSmallerPlanError(MemfitError):
    """Say why there is no smaller plan to go on with that keeps the results."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"There is no smaller plan: {reason}")


class PlanFileError(MemfitError):
    """Say why a plan file cannot be read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"Cannot read the plan file {path}: {reason}. `memfit plan --save FILE` writes one."
        )


class ConfigFileError(MemfitError):
    """Say which configuration file cannot be read or changed, and why."""

    def __init__(self, reason: str, path: object = "") -> None:
        self.reason = reason
        super().__init__(f"{path}: {reason}. Nothing has been written." if path else reason)


class NoExactFactorsError(MemfitError):
    """Say which effective batch has no exact factors, and name the nearest that have."""

    exit_code = 3

    def __init__(self, wanted: str, offers: Sequence[str]) -> None:
        self.offers = tuple(offers)
        super().__init__(
            f"{wanted} has no exact factors. Nearest: {'; '.join(offers)}. Nothing has been "
            "written."
        )


class UndoError(MemfitError):
    """Say why an applied plan cannot be taken back."""


class RecordingError(MemfitError):
    """Say why the step could not be recorded without running it."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"The step cannot be recorded: {what}. {remedy}")


class OpaqueTensorError(RecordingError):
    """Name the tensor subclass whose memory cannot be counted, and what it lacks."""

    def __init__(self, kind: type) -> None:
        self.kind = f"{kind.__module__}.{kind.__qualname__}"
        super().__init__(
            f"the tensor subclass {self.kind} is a wrapper that does not say which tensors it is "
            "made of, so their bytes cannot be counted",
            "Give it __tensor_flatten__ and __tensor_unflatten__ (torch.utils._python_dispatch."
            "TraceableWrapperSubclass describes them), or use `memfit measure` on the machine "
            "itself, which reads the allocator.",
        )


class NoPlanFitsError(MemfitError):
    """Name the smallest peak that any plan reached, and what holds it.

    ``smallest_plan``, where it is known, gives that plan with all that was tried, a
    ``PlanningResult`` as of plans that fit.
    """

    exit_code = 3
    smallest_plan: Callable[[], Any] | None = None

    def __init__(
        self,
        budget_bytes: int,
        smallest_peak_bytes: int,
        by_category: Mapping[str, int],
        strategies: Sequence[str],
        remedies: Sequence[str] = (),
    ) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_peak_bytes = smallest_peak_bytes
        self.by_category = dict(by_category)
        self.strategies = tuple(strategies)
        largest = sorted(by_category.items(), key=lambda item: -item[1])
        held = ", ".join(
            f"{name} {format_bytes(num_bytes)}" for name, num_bytes in largest if num_bytes
        )
        excess = format_bytes(smallest_peak_bytes - budget_bytes)
        with_plan = " + ".join(strategies) or "no strategy"
        advice = " ".join(remedies) or "Raise the budget, or allow approximations with --allow."
        super().__init__(
            f"No plan fits the budget of {format_bytes(budget_bytes)}. The smallest peak reached "
            f"is {format_bytes(smallest_peak_bytes)}, {excess} too much, with "
            f"{with_plan}. It holds: {held}. {advice}"
        )


class PeakAboveBudgetError(MemfitError):
    """Say that a training has taken more than it was to take; ``result`` is all that it found."""

    exit_code = 3

    def __init__(self, budget_bytes: int, result: Mapping[str, Any]) -> None:
        self.result = {**result, "is_within_budget": False}
        measured_bytes = result["measured_peak_bytes"]
        super().__init__(
            f"The measured peak of {format_bytes(measured_bytes)} is "
            f"{format_bytes(measured_bytes - budget_bytes)} above the budget of "
            f"{format_bytes(budget_bytes)}; predicted were "
            f"{format_bytes(result['predicted_peak_bytes'])}. The run is whole in "
            f"{result['run_folder']}; give a smaller budget to plan with more room."
        )


class OutOfMemoryAfterAllError(MemfitError):
    """Say that a step ran out of memory under every plan there was to go on with."""

    exit_code = 4

    def __init__(self, step: int, tried: Sequence[str], cause: str, reason: str) -> None:
        many = f"{len(tried)} plans, from {tried[0]} to {tried[-1]}"
        plans = many if len(tried) > 3 else "; ".join(tried)
        super().__init__(
            f"Step {step} ran out of memory ({cause}), and there is no smaller plan to go on with: "
            f"{reason} Tried: {plans}. Parameters, optimizer states, buffers and random states are "
            "those of before that step. Plan with a smaller budget, or take a larger device."
        )


class UpdateCutError(MemfitError):
    """Say that memory ran out while parameters were updated, and that this could not be undone."""

    exit_code = 4

    def __init__(self, step: int, cause: str, reason: str) -> None:
        super().__init__(
            f"Step {step} ran out of memory in its update ({cause}). Parameters may be updated in "
            f"part, and there is nothing to go back to: {reason}. Continue from a checkpoint, with "
            "a plan for a smaller budget."
        )


class UndoFailedError(MemfitError):
    """Say that a step ran out of memory, and that undoing it failed in turn."""

    exit_code = 4

    def __init__(self, step: int, cause: str, reason: str) -> None:
        super().__init__(
            f"Step {step} ran out of memory ({cause}), and undoing it failed "
            f"({reason.rstrip('.')}). What it has changed may be put back in part, so the run "
            "takes no more steps. Continue from a checkpoint, with a plan for a smaller budget."
        )


class NotPutBackError(MemfitError):
    """Say that a step cannot be run again, because it reaches what nobody can put back."""

    exit_code = 4

    def __init__(self, step: int, cause: str, sentences: str) -> None:
        super().__init__(
            f"Step {step} ran out of memory ({cause}) and cannot be undone: {sentences} Continue "
            "from a checkpoint with a plan for a smaller budget, or keep this out of what model, "
            "loss and optimizer reach."
        )


class BatchChangedError(MemfitError):
    """Say that a step cannot be run again, because it has changed its own batch."""

    exit_code = 4

    def __init__(self, step: int, cause: str) -> None:
        super().__init__(
            f"Step {step} ran out of memory ({cause}) and cannot be run again: the job's "
            "loss has changed the batch in place. Everything else is as it was before that step. "
            "Let the loss work on a copy, or go on with the batch built anew and a smaller plan."
        )


class NotSeparableError(MemfitError):
    """Say that pieces of a batch do not give its gradients, before anything is updated."""

    exit_code = 6
    where = ""
    remedy = "Plan again with --forbid for this strategy, or keep the batch whole."

    def __init__(self, strategy: str, reason: str) -> None:
        self.strategy, self.reason = strategy, reason
        kept = f"{strategy} does not keep the results{self.where}"
        super().__init__(f"{kept}: {reason} Nothing has been updated. {self.remedy}".rstrip())


class BatchConditionError(NotSeparableError):
    """Say that a batch holds what the proof of a plan excludes, before anything is updated."""

    where = " on this batch"
    remedy = ""


GIVEN_UP = (OutOfMemoryAfterAllError, UpdateCutError, NotPutBackError, BatchChangedError)
"""What a guarded step raises when it cannot go on after running out of memory."""


class LostContextError(MemfitError):
    """Say that a card's context is lost, and where training can go on from."""

    exit_code = 5

    def __init__(self, step: int, cause: str, checkpoint: str | None, checkpoint_step: int) -> None:
        saved = (
            f"What step {checkpoint_step} left is saved in {checkpoint}; continue in a new process "
            "with run.load_state_dict(torch.load(...))."
            if checkpoint
            else "Nothing could be saved; continue in a new process from your last checkpoint."
        )
        super().__init__(
            f"Step {step} lost the context of its card ({cause}). Nothing more can be computed on "
            f"it in this process. {saved} CUDA_LAUNCH_BLOCKING=1 shows the operator at fault."
        )


class OtherRankError(MemfitError):
    """Say that another rank has failed or died, so that this one cannot go on."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Another rank has failed: {reason}. This rank stops as well; its own message, or the "
            "launcher's, says why."
        )


class CheckpointError(MemfitError):
    """Say that a checkpoint in shards cannot be written or read, on all ranks alike."""

    def __init__(self, verb: str, folder: object, reason: str) -> None:
        kept = (
            "The save before it, if there was one, is whole."
            if verb == "write"
            else "Nothing can be told of the model and the optimizer now: start again from another."
        )
        super().__init__(f"The checkpoint in {folder} cannot be {_DONE[verb]}: {reason}. {kept}")


_DONE = {"write": "written", "read": "read"}


class PromiseBrokenError(MemfitError):
    """Say which plans keep less of the results than they claim, and where they are off."""

    def __init__(self, broken: Sequence[str]) -> None:
        super().__init__(
            f"Less than promised: {'; '.join(broken)}. Do not train with that: plan again with "
            "--forbid NAME for these strategies."
        )


class NothingToVerifyError(MemfitError):
    """Say that a plan would do nothing in a trial, which would show nothing of it."""

    def __init__(self, strategy: str, num_samples: int, micro_batch_size: int) -> None:
        super().__init__(
            f"{strategy} leaves a batch of {num_samples} samples as it is, so a trial would "
            f"compare the plain step with itself. Verify with more than {micro_batch_size} "
            f"samples, for example batch_size={2 * micro_batch_size + 1}, or with smaller "
            "micro-batches."
        )


class TooLargeToVerifyError(MemfitError):
    """Say what is missing to run even a few samples here."""

    def __init__(self, batch_size: int, reason: str) -> None:
        super().__init__(
            f"The plan cannot be verified on this machine: at batch size {batch_size} {reason}. "
            "Verify a job with a smaller model of the same kind, or try --dtype fp32."
        )


class CommandNotStartedError(MemfitError):
    """Say which command could not be started, with the exit code that shells give for it."""

    def __init__(self, command: str, reason: str, *, is_missing: bool) -> None:
        self.exit_code = 127 if is_missing else 126
        super().__init__(
            f"The command {command!r} could not be started: {reason}. Give it as you would type it "
            "without memfit, after `--`."
        )


class MissingExtraError(MemfitError):
    """Name the optional package that is missing, with the pip line."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package}, which is not installed. "
            f"Run: pip install 'memfit[{extra}]'"
        )


class FullDiskError(MemfitError, OSError):
    """Say which disk has no room, what is needed and what is free."""

    def __init__(
        self, path: str, reason: str, needed_bytes: int | None, free_bytes: int | None
    ) -> None:
        figures = {"needed": needed_bytes, "free": free_bytes}
        known = [f"{format_bytes(n)} {word}" for word, n in figures.items() if n is not None]
        found = (
            f"{reason[:1].upper()}{reason[1:]} on the disk that holds {path}"
            f"{': ' if known else ''}{', '.join(known)}"
        )
        super().__init__(f"{found}. Make room there, or give another place.")
        self.path, self.reason = path, reason
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        self.errno, self.strerror = errno.ENOSPC, found

    def __str__(self) -> str:
        """Say the sentence, where an ``OSError`` would put its number before it."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[FullDiskError], tuple[object, ...]]:
        """Be made again in another process from the facts."""
        return type(self), (self.path, self.reason, self.needed_bytes, self.free_bytes)


class DataError(MemfitError):
    """Say which data file is missing or malformed, where, and what to do."""

    def __init__(self, path: str, reason: str, line: int | None = None) -> None:
        super().__init__(f"{path if line is None else f'{path}, line {line}'}: {reason}")
