"""Makes an engine of DeepSpeed for a job, or for a model and an optimizer that are there."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from memfit.analysis.separability import Separability
from memfit.errors import (
    MemfitError,
    MemfitWarning,
    MissingExtraError,
    NotSeparableError,
    StrategyError,
)
from memfit.integrations.batches import num_rows, resized
from memfit.integrations.deepspeed.choice import ZeroChoice
from memfit.integrations.deepspeed.config import AdaptedConfig, adapted, config_of
from memfit.integrations.deepspeed.ending import Ending
from memfit.integrations.deepspeed.pass_watch import PassWatch
from memfit.integrations.deepspeed.run import EngineRun
from memfit.job import Job, Total
from memfit.runtime.planned_steps import apply_strategies
from memfit.session.batches import find_layout
from memfit.session.block_names import first_few
from memfit.session.session import open_session
from memfit.strategies.base import Numerics, Seam
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.facts import JobFacts
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan

_EXACT_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_UNPROVED = str(Numerics.UNPROVED)
_SHOWN = frozenset(
    {
        "activation-checkpointing",
        "allocator-settings",
        "fsdp2",
        "micro-batching",
        "optimizer-implementation",
        "optimizer-offload",
    }
)
"""The strategies that were shown to keep results under an engine."""
_NEEDED_ON_CPU = "deepspeed_shm_comm"
"""What an engine on the CPU always loads (deepspeed/comm/torch.py, 0.19.8)."""
_RELEASE_SECONDS = 1.0
"""A builder closes its lock a moment before it deletes it."""


def start(
    job: Job,
    choice: ZeroChoice | None = None,
    *,
    config: Mapping[str, Any] | str | Path | None = None,
    plan: Plan | None = None,
    allow: Sequence[str] = (),
    folder: str | Path | None = None,
) -> EngineRun:
    """Build a job's model and optimizer here, and an engine of DeepSpeed around them.

    Every rank has to, as under torchrun or the ``deepspeed`` launcher.

    Args:
        job: what to train; its batch is that of one rank, its optimizer one of torch.
        choice: of stage, offload and sizes; ZeRO 2 if neither this nor ``config`` is given.
        config: DeepSpeed's own configuration or its file, in place of a choice.
        plan: strategies that change the model or the optimizer beforehand, such as
            activation-checkpointing.
        allow: ``"unproved"`` lets batches be cut where nobody could follow what the loss does.
        folder: for the checkpoint of an emergency; None writes none.

    Raises:
        MissingExtraError: if DeepSpeed is not installed.
        UsageError: if the configuration contradicts the job.
        StrategyError: if a part of the plan, or of the model, does not go with an engine.
        NotSeparableError: if pieces of a batch would not keep the results.
        MemfitError: if DeepSpeed would wait for the build of an extension that died.
    """
    deepspeed = _deepspeed()
    if choice is not None and config is not None:
        raise MemfitError("Both a choice and a config were given. Give one of the two.")
    _join()
    check_build_locks(_device_type(deepspeed))
    layout = find_layout(job)
    num_ranks, clips = dist.get_world_size(), job.clip_grad_norm
    if config is None:
        choice = choice or ZeroChoice()
        sizes = {"batch_size": job.batch_size, "num_ranks": num_ranks}
        made = config_of(choice, **sizes, clip_grad_norm=clips)
        settings = AdaptedConfig(config=made, changes=(), choice=choice)
    else:
        settings = adapted(
            config, batch_size=job.batch_size, num_ranks=num_ranks, clip_grad_norm=clips
        )
    session = open_session(job, _device_type(deepspeed), layout, _not_run)
    _check_model(session.model)
    facts = gather_facts(session)
    found = _pieces_of(facts, settings.choice.micro_batch_size or job.batch_size, allow)
    apply_strategies(session, _strategies_of(plan or Plan(), settings.choice))
    ending = Ending(folder)
    ending.watch_update(session.optimizer)
    shares = settings.choice.shards_weights
    watch = PassWatch(session.model, session.optimizer, shards_weights=shares)
    engine, *_ = deepspeed.initialize(
        model=session.model, optimizer=session.optimizer, config=settings.config
    )
    session.model = engine
    ending.begin(engine)
    return EngineRun(
        session,
        engine,
        settings.choice,
        found=found,
        watch=watch,
        ending=ending,
        changes=settings.changes,
    )


def fit(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor | Total],
    batch: Any,
    choice: ZeroChoice | None = None,
    *,
    clip_grad_norm: float | None = None,
    **options: Any,
) -> EngineRun:
    """Make an engine for a model and an optimizer that are there: ``run.step(batch)`` runs a step.

    Args:
        model: on the host or this rank's device; the same on every rank.
        optimizer: of torch, over the model's parameters.
        loss: ``(model, batch)``, the mean over the batch, or ``memfit.Total(sum, count)``.
        batch: of one rank, of the size that updates usually have.
        choice: as for ``start``.
        clip_grad_norm: to which the norm of the gradients is clipped; None clips nothing.
        options: ``config``, ``plan``, ``allow`` and ``folder``, as for ``start``.

    Raises:
        MemfitError: as ``start`` does.
    """
    job = Job(
        model=lambda: model,
        batch=lambda size: resized(batch, size),
        loss=loss,
        optimizer=lambda _: optimizer,
        batch_size=num_rows(batch),
        clip_grad_norm=clip_grad_norm,
        name=type(model).__name__,
    )
    return start(job, choice, **options)


def _deepspeed() -> Any:
    """Import DeepSpeed.

    Raises:
        MissingExtraError: if it is not installed.
        MemfitError: if it is older than steps of any length.
    """
    try:
        import deepspeed
    except ImportError:
        feature = "memfit.integrations.deepspeed"
        raise MissingExtraError(feature, "deepspeed", "deepspeed") from None
    if not hasattr(deepspeed.DeepSpeedEngine, "managed_gradient_accumulation"):
        raise MemfitError(
            f"DeepSpeed {deepspeed.__version__} counts the passes of a step itself, so steps could "
            "not be exact. Run: pip install 'deepspeed>=0.19.8'"
        )
    return deepspeed


def _join() -> None:
    """Join torch's default process group, if the launcher has said which.

    Raises:
        MemfitError: if there is neither a group nor a launcher.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        msg = (
            "DeepSpeed needs a process group, and this process has none. Start it with torchrun or "
            "deepspeed, or call torch.distributed.init_process_group first."
        )
        raise MemfitError(msg)
    dist.init_process_group()


def _device_type(deepspeed: Any) -> str:
    name = str(deepspeed.accelerator.get_accelerator().device_name())
    return "cpu" if name == "cpu" else "cuda"


def _not_run(*_: object) -> torch.Tensor:
    raise AssertionError("the engine computes the gradients")


def _check_model(model: torch.nn.Module) -> None:
    """Refuse models that an engine would train in another precision, or that are wrapped already.

    Raises:
        StrategyError: with the reason.
    """
    wide = [n for n, p in model.named_parameters() if p.dtype not in _EXACT_DTYPES]
    wrapped = type(model).__name__ in {"DistributedDataParallel", "FullyShardedDataParallel"}
    sharded = any(hasattr(each, "device_mesh") for each in model.parameters())
    reason = ""
    if wide:
        reason = (
            f"{first_few(wide)} is wider than fp32, and DeepSpeed keeps its weights and states in "
            "fp32, so the results would be rounded. Build the model in fp32; memfit.start trains "
            "in fp64, in DistributedDataParallel or under fully_shard."
        )
    elif wrapped or sharded:
        reason = "the model is sharded or wrapped already, which the engine does. Give it plain."
    if reason:
        raise StrategyError("DeepSpeed", reason)


def _pieces_of(facts: JobFacts, micro_batch_size: int, allow: Sequence[str]) -> Separability:
    """Find out whether a batch may be cut into the passes and ranks of a step.

    Raises:
        NotSeparableError: if pieces would not keep the results, or nobody could follow them.
        StrategyError: if the forward changes something in every pass.
    """
    pieces = MicroBatching(micro_batch_size=micro_batch_size)
    found = pieces.separability(facts.separation)
    if micro_batch_size >= facts.batch_size:
        if dist.get_world_size() > 1 and (facts.batch_norms or found.is_refuted):
            reason = found.sentence or "batch normalisation takes statistics of a rank's own batch."
            msg = f"Each rank computes its own batch, which is not the whole one: {reason}"
            warnings.warn(msg, MemfitWarning, stacklevel=3)
        return found
    if obstacle := pieces.obstacle(facts):
        raise NotSeparableError(pieces.label(), obstacle)
    if not found.is_settled and _UNPROVED not in allow:
        reason = f'{found.sentence} Give allow=["{_UNPROVED}"] to train so all the same.'
        raise NotSeparableError(pieces.label(), reason)
    _check_forward(facts, found)
    return found


def _check_forward(facts: JobFacts, found: Separability) -> None:
    """Refuse forwards that change more than a step would, where each pass does so.

    Raises:
        StrategyError: with what changes.
    """
    if facts.separation is None:
        return
    effects = facts.separation.effects()
    for effect in effects.writes:
        is_of_job = effect.owner.partition(".")[0] in {"model", "loss"}
        if is_of_job and not {effect.name, effect.full_name} & {*found.overwritten}:
            reason = f"{effect.sentence()} Each pass would do so. Leave micro_batch_size out."
            raise StrategyError("DeepSpeed", reason)


def _strategies_of(plan: Plan, choice: ZeroChoice) -> list[Any]:
    """Return what of a plan is applied beforehand: its pieces are the choice's matter.

    Raises:
        StrategyError: if there is anything that was not shown to go with ranks that share a model.
    """
    kept = []
    for each in plan.strategies:
        size = None if each.splitting is None else each.splitting.micro_batch_size
        if each.name == MicroBatching.name and size == choice.micro_batch_size:
            continue
        reason = "was not shown to keep results under an engine of DeepSpeed. Leave it out."
        if size is not None:
            reason = f"has another size than micro_batch_size, {choice.micro_batch_size}."
        elif choice.shards_weights and Seam.MODEL in each.seams:
            reason = (
                "puts back what a forward has changed before it recomputes, and in stage 3 that "
                "are the weights themselves. Take the model's own checkpointing, as "
                "gradient_checkpointing_enable of transformers, or stage 2."
            )
        elif each.name in _SHOWN:
            kept.append(each)
            continue
        raise StrategyError("DeepSpeed", f"{each.label()} of the plan {reason}")
    return kept


def check_build_locks(
    device_type: str,
    *,
    root: Path | None = None,
    processes: Path = Path("/proc"),
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Refuse to wait for a build that died; warn of others that this run may come to need.

    Does not see builds of other machines that share the folder, or of other users.

    Raises:
        MemfitError: if an engine on this device would wait for it at once.
    """
    locks = [*_dead_locks(root or _own_root(), processes)]
    if locks:
        wait(_RELEASE_SECONDS)
        locks = [lock for lock in locks if lock in {*_dead_locks(lock.parent.parent, processes)}]
    for lock in locks:
        msg = (
            f"{lock} is left from a build of {lock.parent.name} that died: no process here holds "
            "it open. DeepSpeed would wait for it without end. If no other machine builds there "
            f"now, delete it: rm {lock}"
        )
        if device_type == "cpu" and lock.parent.name == _NEEDED_ON_CPU:
            raise MemfitError(msg)
        warnings.warn(msg, MemfitWarning, stacklevel=4)


def _own_root() -> Path:
    """Return the folder of the builds of this Python and this torch."""
    return Path(cpp_extension._get_build_directory("", verbose=False))


def _dead_locks(root: Path, processes: Path) -> Iterator[Path]:
    locks = [lock for lock in root.glob("*/lock") if lock.exists()]
    if not locks or not processes.is_dir():
        return
    held = {*_open_files(processes)}
    yield from (lock for lock in locks if str(lock.resolve()) not in held)


def _open_files(processes: Path) -> Iterator[str]:
    for link in processes.glob("[0-9]*/fd/*"):
        try:
            yield str(link.readlink())
        except OSError:
            continue  # ended meanwhile, or another user's
