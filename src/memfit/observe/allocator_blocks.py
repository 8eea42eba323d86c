"""Finds the blocks of torch's CPU allocator that live, and tells the allocator how large they are.

The allocator keeps no list of its blocks. It notes the size of a block, and so reports its end to
the profiler, only where it was made while a profiler was active (``ProfiledCPUMemoryReporter`` in
c10/core/CPUAllocator.cpp, read at torch 2.13). What is older than a profile is therefore found
through the tensors that live, and noted by the same function that the allocator notes blocks with:
each is then an event of the profile, as is its end, at its place among all others.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from memfit.observe.allocator_events import GrowthWatch

_HIDDEN_BUCKETS = (
    "DistributedDataParallel keeps buckets of gradients that cannot be seen from Python "
    "(gradient_as_bucket_view=True shows them)"
)
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def living_blocks() -> dict[int, int]:
    """Return the bytes of every living block of torch's CPU allocator by its address.

    Found are the blocks behind tensors that Python has seen, behind the gradients of these, and
    inside sparse ones, and what is shared with other processes, such as workers of data loaders:
    torch reports it alike. Not found are tensors that only C++ holds, such as what a graph has
    saved, and mapped files. Left out is memory of others, such as NumPy's.
    """
    blocks: dict[int, int] = {}
    _visit_living(blocks.__setitem__)
    return blocks


def note_blocks(tensors: Iterable[torch.Tensor]) -> None:
    """Note the blocks behind tensors: their ends are events of the profiles to come in this thread.

    Where a build of torch does not let blocks be noted, none are.
    """
    note, found = _noting(), [*tensors]
    if note is None or not found:
        return
    watch = GrowthWatch()  # the allocator takes notes while it is watched alone
    watch.begin()
    for tensor in found:
        for part in _parts(tensor):
            _visit_block(part, note)
    watch.end()


def note_living_blocks() -> str:
    """Note every living block; each is an event of the profile that is active in this thread.

    Returns:
        What holds blocks that cannot be seen, and what would show them; empty if nothing does.
    """
    note = _noting()
    if note is None:
        return "this build of torch does not let blocks be noted"
    noted: set[int] = set()

    def note_once(address: int, num_bytes: int) -> None:
        if address not in noted:
            noted.add(address)
            note(address, num_bytes)

    return _visit_living(note_once)


def _visit_living(visit: Callable[[int, int], None]) -> str:
    """Call a function with the address and the bytes of blocks, while none of them can end."""
    kinds = {*_kinds(torch.Tensor), DistributedDataParallel}
    # By type, not isinstance: proxies answer __class__ by importing what they stand for, and
    # there are half a million objects to look at.
    found = [each for each in gc.get_objects() if type(each) in kinds]
    models = [each for each in found if type(each) is DistributedDataParallel]
    tensors = [each for each in found if type(each) is not DistributedDataParallel]
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            for part in _with_parts(tensor):
                _visit_block(part, visit)
    return _HIDDEN_BUCKETS if any(_hides(model) for model in models) else ""


def _hides(model: DistributedDataParallel) -> bool:
    """Return whether a model keeps buckets on the CPU that no gradient lies in."""
    if "gradient_as_bucket_view" not in vars(model):
        return False  # its construction ended early, before there were buckets
    parameters = [each for each in model.parameters() if each.requires_grad]
    is_shown = model.gradient_as_bucket_view and all(each.grad is not None for each in parameters)
    return not is_shown and any(each.device.type == "cpu" for each in parameters)


def _kinds(kind: type) -> Iterator[type]:
    """Yield a class and all classes below it."""
    yield kind
    found: list[type] = type.__subclasses__(kind)
    for below in found:
        yield from _kinds(below)


def _with_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor, its gradient, and what they consist of where they are sparse.

    A gradient that nobody has asked for has no object in Python yet.
    """
    try:
        if tensor.device.type != "cpu":
            return
        yield from _parts(tensor)
        if tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad):
            gradient = tensor.grad
            if gradient is not None:
                yield from _parts(gradient)
    except (AttributeError, NotImplementedError, RuntimeError):
        return  # it was never completed, or only stands for others


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield from (getattr(tensor, name)() for name in (*_COMPRESSED[tensor.layout], "values"))
    else:
        yield tensor


def _visit_block(tensor: torch.Tensor, visit: Callable[[int, int], None]) -> None:
    try:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes == 0 or storage.device.type != "cpu":
            return
        address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
        if storage.is_shared():
            # Torch reports what it maps as it reports its blocks; before what several processes
            # count together lies their count (RefcountedMapAllocator in aten/src/ATen).
            head_bytes = address % mmap.PAGESIZE
            visit(address - head_bytes, num_bytes + head_bytes)
        elif _is_of_allocator(tensor, storage):
            visit(address, num_bytes)
    except (NotImplementedError, RuntimeError):
        return  # a tensor that only stands for others has no storage of its own


def _is_of_allocator(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether torch's CPU allocator has given a storage its memory."""
    own_deleter = _own_deleter()
    if own_deleter is None or torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]
        return storage.resizable()
    pointer = _StorageHead.from_address(storage._cdata)
    return bool(pointer.deleter == own_deleter and pointer.context == pointer.data)


class _StorageHead(ctypes.Structure):
    """How a storage begins: ``c10::StorageImpl`` and the ``DataPtr`` in it, torch 2.13.

    Python is not told who frees a storage. Whether it may be resized says less: what ``torch.load``
    has read may not be, and is the allocator's.
    """

    _fields_ = (
        ("virtual_table", ctypes.c_void_p),
        ("counts", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


@cache
def _own_deleter() -> int | None:
    """Return the address of what frees the allocator's blocks; None if storages begin otherwise."""
    blocks = [torch.empty(number, dtype=torch.uint8) for number in (1, 100)]
    heads = [_StorageHead.from_address(block.untyped_storage()._cdata) for block in blocks]
    is_as_read = all(
        head.data == head.context == block.data_ptr()
        for head, block in zip(heads, blocks, strict=True)
    )
    deleters = {head.deleter for head in heads}
    return deleters.pop() if is_as_read and len(deleters) == 1 else None


@cache
def _noting() -> Callable[[int, int], None] | None:
    """Return the function of torch that notes a block; None where this build shows none.

    The names say what the functions take, so others are not called by mistake:
    ``c10::profiledCPUMemoryReporter()`` and ``c10::ProfiledCPUMemoryReporter::New(void*, size_t)``.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        reporter = library["_ZN3c1025profiledCPUMemoryReporterEv"]
        new = library["_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm"]
    except (AttributeError, OSError):
        return None
    reporter.argtypes, reporter.restype = [], ctypes.c_void_p
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    instance = reporter()

    def note(address: int, num_bytes: int) -> None:
        new(instance, address, num_bytes)

    return note
