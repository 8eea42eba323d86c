"""The real machine. torch is imported by a child process, which may crash or take its time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import memfit
from memfit.devices.detect import CudaDevice, Host, host_without_torch

from .machine import Machine, Probe, Space

_LONGEST_PROGRAM_SECONDS = 10.0
_LONGEST_IMPORT_SECONDS = 120.0
# Modules that are built against one torch and do not say which; only loading them tells.
_BUILT_FOR_TORCH = ("flash_attn_2_cuda", "flash_attn_3._C")
_CHILD = """
import importlib, importlib.util, json, sys
sys.path.append(sys.argv[1])
from dataclasses import asdict
from memfit.devices.detect import host
seen = {"host": asdict(host()), "nccl_version": None, "import_problems": {}}
torch = sys.modules.get("torch")
if torch is not None:
    try:
        nccl = torch.cuda.nccl.version() if torch.version.cuda else None
        seen["nccl_version"] = list(nccl) if isinstance(nccl, tuple) else None
    except Exception:
        pass
    for name in sys.argv[2:]:
        try:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
        except ModuleNotFoundError:
            pass
        except Exception as error:
            seen["import_problems"][name] = " ".join(str(error).split())
print("\\n" + json.dumps(seen))
"""


def this_machine() -> Machine:
    """Look at the machine that this runs on."""
    return Machine(
        variables=dict(os.environ),
        search_paths=tuple(Path(path).absolute() for path in sys.path if path),
        home=Path.home(),
        python_tag=f"py{sys.version_info[0]}{sys.version_info[1]}{getattr(sys, 'abiflags', '')}",
        python_headers=Path(sysconfig.get_paths()["include"]),
        now_seconds=time.time(),
        system=sys.platform,
        which=shutil.which,
        output_of=_output_of,
        space_of=_space_of,
        is_writable=lambda path: os.access(path, os.W_OK),
        probe=probe_torch(),
    )


def probe_torch(longest_seconds: float = _LONGEST_IMPORT_SECONDS) -> Probe:
    """Import torch in a process of its own and return what it saw.

    A child that crashes, hangs or says nothing is a torch that cannot be imported.
    """
    sources = str(Path(memfit.__file__).parents[1])
    words = [sys.executable, "-P", "-c", _CHILD, sources, *_BUILT_FOR_TORCH]
    try:
        ended = _ended(words, longest_seconds)
    except subprocess.TimeoutExpired:
        return Probe(host=host_without_torch(f"not imported within {longest_seconds:g} seconds"))
    except OSError as error:
        return Probe(host=host_without_torch(f"no process could be started ({error})"))
    try:
        return _read(ended.stdout.rstrip().rpartition("\n")[2])
    except (AttributeError, LookupError, TypeError, ValueError):
        last = ended.stderr.strip().rpartition("\n")[2]
        how = f"the process that imports it ended with {ended.returncode}"
        return Probe(host=host_without_torch(f"{how}: {last}" if last else how))


def _read(line: str) -> Probe:
    seen = json.loads(line)
    host = seen["host"]
    cards = tuple(CudaDevice(**card) for card in host.pop("cuda_devices"))
    nccl = seen["nccl_version"]
    return Probe(
        host=Host(**host, cuda_devices=cards),
        nccl_version=None if nccl is None else tuple(map(int, nccl)),
        import_problems=seen["import_problems"],
    )


def _output_of(words: Sequence[str]) -> str | None:
    """Run a program and return what it prints; None when it fails or takes too long."""
    try:
        ended = _ended(words, _LONGEST_PROGRAM_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout if ended.returncode == 0 else None


def _space_of(path: Path) -> Space | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(free_bytes=usage.free, total_bytes=usage.total)


def _ended(words: Sequence[str], longest_seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program without input to its end, and keep what it prints."""
    return subprocess.run(
        words,
        capture_output=True,
        check=False,
        text=True,
        errors="replace",
        timeout=longest_seconds,
        stdin=subprocess.DEVNULL,
    )
