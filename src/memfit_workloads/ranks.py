"""The processes that train one model together: who they are, and how they agree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from memfit.errors import MemfitError
from memfit.losses.ranks import AllRanks

if TYPE_CHECKING:
    from rich.console import Console

_PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others, who may be drawing samples or writing files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    num_ranks: int = 1
    group: AllRanks | None = None
    """None for a process that is alone."""

    @property
    def is_first(self) -> bool:
        """Return whether this process is the one that writes and prints."""
        return self.rank == 0

    def any(self, is_true: bool, device: torch.device) -> bool:
        """Return whether something is true on any rank; all get the same answer."""
        if self.group is None:
            return is_true
        flag = torch.tensor(float(is_true), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag > 0)

    def same(self, parameters: Sequence[Tensor]) -> None:
        """Begin with the first rank's parameters everywhere."""
        if self.group is not None:
            for parameter in parameters:
                dist.broadcast(parameter.data, 0)

    def check_in_step(self, parameters: Sequence[Tensor]) -> None:
        """Refuse to go on if the ranks' networks are no longer the same, bit for bit.

        Raises:
            MemfitError: if they are not.
        """
        if self.group is None:
            return
        own = torch.stack([each.detach().double().sum() for each in parameters]).sum()
        found = [torch.zeros_like(own) for _ in range(self.num_ranks)]
        dist.all_gather(found, own)
        if len({float(each) for each in found}) > 1:
            msg = (
                "The ranks' networks have drifted apart: their sums are "
                f"{', '.join(f'{float(each):.17g}' for each in found)}. No final model is written; "
                "continue from the last checkpoint with --resume."
            )
            raise MemfitError(msg)

    def wait(self) -> None:
        """Wait until every rank has come here."""
        if self.group is not None:
            dist.barrier()


@contextmanager
def joined_ranks(device: str | None) -> Iterator[Ranks]:
    """Join the processes that torchrun started; alone without it.

    An error in one rank ends its process, which the others notice at their next exchange, and
    torchrun at once.
    """
    if not is_a_rank():
        yield Ranks()
        return
    use_cuda = device != "cpu" and torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=_PATIENCE)
    ranks = Ranks(rank=dist.get_rank(), num_ranks=dist.get_world_size(), group=AllRanks())
    try:
        yield ranks
    except Exception as error:
        raise _named(error, ranks.rank, ranks.num_ranks) from error
    dist.destroy_process_group()


def is_a_rank() -> bool:
    """Return whether torchrun, or something like it, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def usual_num_ranks() -> int:
    """Return how many ranks are started where nothing is said: one per GPU, or two without."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def start_ranks(command: Sequence[str], num_ranks: int | None, console: Console) -> None:
    """Run a memfit command in several processes of this machine, and wait for them.

    Raises:
        MemfitError: if one of them fails, which ends all.
        KeyboardInterrupt: after Ctrl-C, once all have ended.
    """
    num_ranks = num_ranks or usual_num_ranks()
    console.print(f"starting {num_ranks} ranks", soft_wrap=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*launcher, f"--nproc-per-node={num_ranks}", "-m", "memfit", *command]
    threads = max(1, torch.get_num_threads() // num_ranks)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    output: Any = sys.stderr if console.stderr or console.file is sys.stderr else None
    ranks = subprocess.Popen(words, env=environment, stdout=output)
    try:
        code = ranks.wait()
    except KeyboardInterrupt:
        ranks.wait()
        raise
    if code:
        msg = (
            f"One of the {num_ranks} ranks failed (exit code {code}), and all have been ended; its "
            "message stands above. Checkpoints written so far are whole; continue with --resume."
        )
        raise MemfitError(msg)


def _named(error: Exception, rank: int, num_ranks: int) -> MemfitError:
    """Return which rank an error is from, and whether it is only the echo of another's."""
    name = f"Rank {rank} of {num_ranks}"
    if isinstance(error, MemfitError):
        return MemfitError(f"{name}: {error}")
    text = str(error).partition("\n")[0]
    if any(word in text for word in ("Connection closed", "Connection reset", "NCCL", "Timed out")):
        return MemfitError(f"{name} stops: another rank has ended or does not answer ({text}).")
    return MemfitError(f"{name} failed: {type(error).__name__}: {text}")
