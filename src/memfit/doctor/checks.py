"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .allocator import check_allocator
from .bitsandbytes import check_bitsandbytes
from .caches import check_caches
from .card import check_card
from .companions import check_companions
from .compilers import check_compilers
from .deepspeed import check_deepspeed
from .extensions import check_extensions
from .finding import Finding, Status
from .installation import check_installation
from .libraries import check_libraries
from .machine import Machine
from .nccl import check_nccl
from .requirements import check_requirements
from .settings import check_settings
from .shared_memory import check_shared_memory
from .torch_build import check_torch_build

CHECKS: tuple[Callable[[Machine], Iterable[Finding]], ...] = (
    check_installation,
    check_torch_build,
    check_card,
    check_companions,
    check_bitsandbytes,
    check_deepspeed,
    check_requirements,
    check_nccl,
    check_libraries,
    check_compilers,
    check_extensions,
    check_caches,
    check_shared_memory,
    check_settings,
    check_allocator,
)
# What odd files, links and versions raise where no check expects them.
_ODD = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)


def all_findings(machine: Machine) -> Iterator[Finding]:
    """Make every check; one that cannot be made says so and keeps no other from being made."""
    for check in CHECKS:
        try:
            yield from check(machine)
        except _ODD as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding(
                name=name,
                status=Status.WARNING,
                found=f"could not be checked: {type(error).__name__}: {error}",
                needed="files that can be read",
                remedy="Look at what the message names; everything else has been checked.",
            )
