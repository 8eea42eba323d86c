"""One rank of several, recorded without the others: torch's fake process group, opened for a while.

The fake group answers for its world and carries out no collective; torch's own code does all else,
so a job says that it is distributed as a script under ``torchrun`` does: with ``fully_shard``,
``DistributedDataParallel``, ``init_device_mesh``, or the environment.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlparse

import torch

from memfit.devices.placement import Placement
from memfit.errors import RecordingError, UsageError

_CURRENT: ContextVar[Placement | None] = ContextVar("placement", default=None)
_ANY_PORT = "29500"
_RANKS_SET = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables of torchrun that say which of how many ranks a process is."""
ALONE = (
    "Set RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 to predict it alone on one card; for several ranks write "
    "its step as a memfit.Job and predict that with --ranks N (docs/ranks.md)"
)
SAY_RANKS = (
    "Say how many ranks train together, with --ranks N or memfit.predict(..., ranks=N): a process "
    "group is open then while the job's functions are called."
)
_SAID_BY_FSDP2 = "FSDP2-wrapped module"
"""Of outputs that are views; whoever runs such a model for real is told."""


def current_placement() -> Placement | None:
    """Return the placement whose rank is recorded; None where no group was opened here."""
    return _CURRENT.get()


@contextmanager
def one_rank_of(placement: Placement | None) -> Iterator[None]:
    """Be one rank of a placement inside; without a placement nothing changes.

    Raises:
        UsageError: if a process group is open already.
        RecordingError: if this torch has no fake process group.
    """
    if placement is None:
        yield
        return
    _open(placement)
    with ExitStack() as stack:
        stack.callback(torch.distributed.destroy_process_group)
        for replacement in _replacements(placement):
            stack.enter_context(replacement)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", _SAID_BY_FSDP2, UserWarning)
        token = _CURRENT.set(placement)
        stack.callback(_CURRENT.reset, token)
        yield


def check_is_alone(*args: Any, **kwargs: Any) -> None:
    """Refuse a process group of several ranks, of which one would be recorded as if it were alone.

    Args:
        args: those of ``torch.distributed.init_process_group``.
        kwargs: the same.

    Raises:
        RecordingError: if it has more than one rank and they are not torch's fake ones.
    """
    given = dict(zip(("backend", "init_method", "timeout", "world_size"), args, strict=False))
    given |= kwargs
    address = parse_qs(urlparse(given.get("init_method") or "").query)
    sizes = (given.get("world_size"), *address.get("world_size", ()), os.environ.get("WORLD_SIZE"))
    num_ranks = next((int(size) for size in sizes if size and int(size) > 0), 1)
    if num_ranks > 1 and given.get("backend") != "fake":
        what = (
            f"its process group has {num_ranks} ranks, of which one would be predicted as if alone"
        )
        raise RecordingError(what, f"{ALONE}.")


def alone_in_scripts() -> Iterator[Any]:
    """Yield what refuses, wherever a script may open it, a process group of several ranks."""
    if not torch.distributed.is_available():
        return
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        begin = module.init_process_group

        def checked(*args: Any, _begin: Any = begin, **kwargs: Any) -> Any:
            check_is_alone(*args, **kwargs)
            return _begin(*args, **kwargs)

        yield patch.object(module, "init_process_group", checked)


def is_about_ranks(error: Exception) -> bool:
    """Return whether code has missed what torchrun says of its process."""
    return isinstance(error, KeyError) and error.args[:1] in [(each,) for each in _RANKS_SET]


@contextmanager
def groups_counted() -> Iterator[list[int]]:
    """Yield a list that holds, afterwards, how many ranks each group of this rank has.

    The default group comes first. Groups that an earlier recording has left open do not count, nor
    does any group where none was opened for a placement.
    """
    sizes: list[int] = []
    placement = current_placement()
    if placement is None:
        yield sizes
        return
    before = set(_groups_of(placement.rank))
    yield sizes
    made = (size for group, size in _groups_of(placement.rank).items() if group not in before)
    sizes += [placement.num_ranks, *made]


@contextmanager
def shapes_asked_unseen(unseen: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have DTensor ask after the shapes of its operators' results without being seen.

    It runs the operator on fake tensors of the whole shape, in the fake mode that is active if
    there is one (torch/distributed/tensor/_sharding_prop.py, torch 2.13); no card has them.
    """
    if current_placement() is None and "torch.distributed.tensor" not in sys.modules:
        yield
        return
    kind = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
    with ExitStack() as stack:
        for name in ("_propagate_tensor_meta_non_cached",):
            if hasattr(kind, name):
                stack.enter_context(patch.object(kind, name, _asked(getattr(kind, name), unseen)))
        yield


def _asked(ask: Any, unseen: Callable[[], AbstractContextManager[None]]) -> Any:
    @functools.wraps(ask)
    def answer(*args: Any, **kwargs: Any) -> Any:
        with unseen():
            return ask(*args, **kwargs)

    return answer


def _groups_of(rank: int) -> dict[Any, int]:
    """Return the groups that a rank belongs to, with their numbers of ranks."""
    groups = torch.distributed.distributed_c10d._world.pg_group_ranks
    return {group: len(ranks) for group, ranks in groups.items() if rank in ranks}


def _open(placement: Placement) -> None:
    if not torch.distributed.is_available():
        raise RecordingError(
            "this build of torch has no torch.distributed",
            "Install one that has, or leave the number of ranks out.",
        )
    if torch.distributed.is_initialized():
        raise UsageError(
            "A process group is open already, of "
            f"{torch.distributed.get_world_size()} rank(s). Close it with "
            "destroy_process_group(), or leave the number of ranks out to predict this rank of it."
        )
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415
    except ImportError as error:
        raise RecordingError(
            f"torch {torch.__version__} has no fake process group",
            "Use torch 2.11 or newer to predict one of several ranks.",
        ) from error
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=placement.rank, world_size=placement.num_ranks
    )


def _replacements(placement: Placement) -> Iterator[Any]:
    """Yield what stands in for the parts of torch that would look for the others."""
    yield patch.dict(os.environ, _environment(placement))
    # It numbers collectives that are not carried out with what the job's own code may draw from.
    numbering = importlib.import_module("torch.distributed._meta_registrations")
    yield patch.object(numbering, "random", random.Random(0))
    core = torch.distributed.distributed_c10d
    answers = {
        "init_process_group": _nothing,
        "destroy_process_group": _keep_open,
        "new_group": _of_this_world(core.new_group),
        "broadcast_object_list": _nothing,
        "all_gather_object": _own_everywhere,
        "gather_object": _own_everywhere_if_asked,
        "scatter_object_list": _own_of_scattered,
    }
    for module in (torch.distributed, core):
        for name, answer in answers.items():
            yield patch.object(module, name, answer)


def _environment(placement: Placement) -> dict[str, str]:
    """Return the variables that torchrun sets."""
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(placement.num_ranks),
        "LOCAL_WORLD_SIZE": str(placement.ranks_per_node),
        "GROUP_RANK": str(placement.node),
        "GROUP_WORLD_SIZE": str(placement.num_nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _ANY_PORT,
    }


def _of_this_world(new_group: Any) -> Any:
    """Make groups of ranks that are not there, whatever backend is asked for."""

    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("backend", None)
        kwargs.pop("pg_options", None)
        # By position: ranks, timeout, backend, pg_options.
        return new_group(*args[:2], **kwargs)

    return make


def _keep_open(group: Any = None) -> None:
    """Close nothing: the group is closed when the recording is over."""


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Exchange nothing: the group is open, and every rank has what this one has."""


def _own_everywhere(object_list: list[Any], obj: Any, *_args: Any, **_kwargs: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _own_everywhere_if_asked(
    obj: Any, object_gather_list: list[Any] | None = None, *_args: Any, **_kwargs: Any
) -> None:
    if object_gather_list is not None:
        _own_everywhere(object_gather_list, obj)


def _own_of_scattered(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    if scatter_object_input_list is not None:
        rank = torch.distributed.get_rank()
        scatter_object_output_list[0] = scatter_object_input_list[rank]
