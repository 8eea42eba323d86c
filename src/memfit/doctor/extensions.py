"""The cache in which torch builds extensions: locks of builds that died, and builds gone stale.

Source: torch/utils/file_baton.py and torch/utils/cpp_extension.py of torch 2.13. The lock is a file
that the builder holds open and deletes; who finds it waits without end. ninja follows the headers
that ``-MMD`` names, which leaves out those given by ``-isystem``, as torch's are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine

# A lock lives as long as one build; few extensions take this long to compile.
_LONG_BUILD_SECONDS = 600.0
_SYMPTOM = "a run that needs it waits without end after 'Using ... as PyTorch extensions root'"


def extension_roots(machine: Machine) -> tuple[Path, ...]:
    """Return the folders below which torch builds, whether they exist or not."""
    chosen = machine.variables.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return (Path(chosen),)
    cache = machine.variables.get("XDG_CACHE_HOME")
    roots = [Path(cache) if cache else machine.home / ".cache"]
    if machine.system == "darwin":
        roots.append(machine.home / "Library" / "Caches")
    return tuple(root / "torch_extensions" for root in roots)


def check_extensions(machine: Machine) -> Iterator[Finding]:
    """Find stale locks, builds older than torch, and builds for other Pythons."""
    roots = [root for root in extension_roots(machine) if root.is_dir()]
    if not roots:
        yield not_applicable("built extensions", "torch has built no extension here yet")
        return
    builds = [build for root in roots for build in _builds(machine, root)]
    found = [*_check_locks(machine, builds), *_check_ages(machine, builds)]
    others = sorted({build.parent.name for build in builds if not _is_ours(machine, build)})
    if others:
        found.append(
            Finding(
                name="other builds",
                status=Status.NOTE,
                found=f"extensions built for another Python or CUDA: {', '.join(others)}",
                remedy="Delete these folders once no environment needs them.",
            )
        )
    yield from found or [fine("built extensions", f"{len(builds)} built, none locked")]


def _builds(machine: Machine, root: Path) -> list[Path]:
    """List the folders of single extensions; a chosen root has no level for Python and CUDA."""
    pattern = "*" if machine.variables.get("TORCH_EXTENSIONS_DIR") else "*/*"
    return sorted(path for path in root.glob(pattern) if path.is_dir())


def _is_ours(machine: Machine, build: Path) -> bool:
    """Return whether a run with this Python and this torch would use a build."""
    if machine.variables.get("TORCH_EXTENSIONS_DIR") or machine.torch is None:
        return True
    torch = machine.torch
    if torch.hip:
        kind = f"rocm{torch.hip.replace('.', '')}"
    else:
        kind = f"cu{torch.cuda.replace('.', '')}" if torch.cuda else "cpu"
    return build.parent.name == f"{machine.python_tag}_{kind}"


def _check_locks(machine: Machine, builds: Iterable[Path]) -> Iterator[Finding]:
    locks = [build / "lock" for build in builds if (build / "lock").exists()]
    holders = _holders(machine) if locks else {}
    for lock in locks:
        try:
            age_seconds = machine.now_seconds - lock.stat().st_mtime
        except OSError:
            continue  # the build has just ended
        name = f"build lock {lock.parent.name}"
        holder = (holders or {}).get(str(lock.resolve()))
        if holder:
            yield Finding(
                name=name,
                status=Status.NOTE,
                found=f"{lock} is held by process {holder}, which builds it now",
            )
            continue
        is_sure = age_seconds > _LONG_BUILD_SECONDS and _is_ours(machine, lock.parent)
        known = "and no process here holds it open" if holders is not None else ""
        yield Finding(
            name=name,
            status=Status.PROBLEM if is_sure else Status.WARNING,
            found=f"{lock} is {age_seconds / 60:.0f} minutes old {known}; {_SYMPTOM}".replace(
                " ;", ";"
            ),
            needed="a lock is there only while its extension is being built",
            remedy="Delete the lock if no other machine or container builds this extension now.",
            command=f"rm {lock}",
        )


def _holders(machine: Machine) -> dict[str, str] | None:
    """Return which process holds which file open; None where the system does not tell."""
    processes = machine.at("/proc")
    if not processes.is_dir():
        return None
    held = {}
    for link in processes.glob("[0-9]*/fd/*"):
        try:
            held[str(link.readlink())] = link.parts[-3]
        except OSError:
            continue  # ended meanwhile, or another user's
    return held


def _check_ages(machine: Machine, builds: Iterable[Path]) -> Iterator[Finding]:
    """Find libraries that were built before the torch that is installed now."""
    if machine.torch is None:
        return
    installed = _modified_seconds(machine.torch.folder / "version.py")
    old = [
        build
        for build in builds
        if _is_ours(machine, build)
        and any(_modified_seconds(library) < installed for library in build.glob("*.so"))
    ]
    if old:
        names = ", ".join(build.name for build in old)
        yield Finding(
            name="old builds",
            status=Status.WARNING,
            found=f"built before torch {machine.torch.version} was installed: {names}",
            needed="extensions built with the headers of this torch; ninja does not follow these",
            remedy="Delete the builds; they are made anew when they are next needed.",
            command=f"rm -r {' '.join(map(str, old))}",
        )


def _modified_seconds(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
