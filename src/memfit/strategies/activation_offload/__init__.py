"""Activation offload: what blocks save for backward waits on the host or on disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from memfit.devices.spec import CPU
from memfit.errors import StrategyError
from memfit.session.forwards import is_recomputed_later, replace_forward
from memfit.session.gathered import has_shards, storages_of
from memfit.session.session import Session
from memfit.session.spill import Spill
from memfit.strategies.activation_offload.host_copies import BufferPool, CopyStream
from memfit.strategies.activation_offload.host_storage import (
    FileStorage,
    HostStorage,
    HostThenFileStorage,
    Kept,
    Storage,
)
from memfit.strategies.activation_offload.spill_file import SpillFile
from memfit.strategies.base import HOST, AbstractBlockwise, AbstractOffload, Numerics, Seam, Undo
from memfit.strategies.facts import JobFacts, shared_facts

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


@dataclass(frozen=True, kw_only=True)
class ActivationOffload(AbstractOffload, AbstractBlockwise):
    """Move what blocks save for backward to the host or to disk, and back when it is needed.

    ``blocks`` are names of modules, a range of numbered siblings being written ``layers.0-11``;
    none at all means the repeated blocks of the outermost level. ``to`` is ``host`` (on a GPU) or
    ``disk``. Copies to the host run beside the computation: those of one block while the next one
    computes, and back one block ahead. The last block's tensors stay, as backward needs them first.
    A block that is checkpointed as well saves its inputs alone, so these alone are moved.

    Stays on the device: parameters and buffers, and what is smaller than ``min_tensor_bytes``: at
    25 GB/s 1 MiB takes 40 us, and starting smaller copies soon costs the host more (a guess).

    Limits: hidden only where a block computes for longer than its bytes take on the link. Where one
    block's copies are unfinished when the next block ends, the computation waits. The pinned
    buffers are kept until the run is closed. The disk is written and read while the step waits.
    Source: the limit follows from two numbers, bytes per second of the link and seconds of a block;
    ordering rules after https://github.com/pytorch/torchtitan/pull/2581, where reused buffers gave
    wrong gradients from the second step on.
    """

    name: ClassVar[str] = "activation-offload"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL, Seam.FORWARD})
    goes_with_shards: ClassVar[bool] = True
    never_faster: ClassVar[bool] = True

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer what there is to move to, where there are blocks."""
        if facts.block_levels:
            yield from super().options(facts)

    def apply(self, session: Session) -> Undo:
        """Wrap the forward of each block."""
        facts = shared_facts(session)
        if reason := self.obstacle(facts):
            raise StrategyError(self.name, reason)
        offloading = _Offloading(session, self._storage(session), self.min_tensor_bytes)
        with ExitStack() as undos:
            undos.callback(offloading.close)
            undos.callback(session.wrap_forward(offloading.begin_forward))
            for name in self.block_names(facts):
                block = session.model.get_submodule(name)
                forward = partial(offloading.run, name, block, block.forward)
                undos.callback(replace_forward(block, forward))
            return undos.pop_all().close

    def _storage(self, session: Session) -> Storage:
        spill = session.spill
        if session.device_type == CPU:
            return FileStorage(SpillFile(spill))
        pool = BufferPool(spill, is_pinned=not session.is_virtual)
        if self.to == HOST:
            return HostStorage(pool, CopyStream())
        return HostThenFileStorage(pool, CopyStream(), SpillFile(spill))


class _Moved:
    """A stretch of device memory that backward asks for, here or outside of it."""

    def __init__(self, flat: torch.Tensor, module: str, storage: Storage, spill: Spill) -> None:
        self.num_expected = 0
        self._flat: torch.Tensor | None = flat
        self._module = module
        self._storage = storage
        self._spill = spill
        self._kept: Kept | None = None
        self._is_settled = False
        self._is_arriving = False
        self._num_bytes = flat.numel() * flat.element_size()
        self._version = flat._version

    def send(self) -> None:
        """Begin to move it out."""
        if self._kept is None and self._flat is not None and not _is_given_back(self._flat):
            self._kept = self._storage.send(self._flat)
            on_disk = self._storage.is_on_disk
            self._spill.note_out(self._module, self._num_bytes, is_on_disk=on_disk)
            weakref.finalize(self, self._storage.forget, self._kept).atexit = False
            if not self._storage.comes_ahead:
                self.settle()

    def settle(self) -> None:
        """Release the device's memory."""
        if self._kept is None or self._flat is None or self._is_settled:
            return
        if not self._is_changed():
            self._storage.settle(self._kept, self._flat)
            self._flat = None
            self._is_settled = True

    def bring(self) -> None:
        """Begin to move it back, if it will be asked for."""
        if self._flat is None and self.num_expected > 0:
            self._fetch()

    def take(self) -> torch.Tensor:
        """Return the stretch, as a flat tensor, to one who asks for it.

        Raises:
            StrategyError: if it was changed in place, as autograd would say without hooks.
        """
        if self._is_changed():
            raise StrategyError(
                ActivationOffload.name,
                f"a tensor that {self._module} saved for backward was changed in place later, "
                "which autograd refuses by itself too. Change a copy of it.",
            )
        flat = self._fetch() if self._flat is None else self._flat
        if self._is_arriving:
            self._storage.claim(flat)
            self._is_arriving = False
        self.num_expected -= 1
        if self._is_settled and self.num_expected <= 0:
            self._flat = None
        return flat

    def _is_changed(self) -> bool:
        """Return whether the device's memory has other values than those that were saved."""
        flat = None if self._is_settled else self._flat
        return flat is not None and flat._version != self._version

    def _fetch(self) -> torch.Tensor:
        assert self._kept is not None, "only what was sent is not here"
        self._flat = self._storage.bring(self._kept)
        self._is_arriving = True
        self._spill.note_in(self._module, self._num_bytes)
        return self._flat


class _Visit:
    """One forward call of a block: what it saved, for as long as backward may ask for it."""

    def __init__(self, module: str, block: torch.nn.Module, previous: _Visit | None) -> None:
        self.module = module
        self.block = block
        self._previous = previous
        self._moved: list[weakref.ref[_Moved]] = []
        self._is_reached = False

    def add(self, moved: _Moved) -> None:
        """Note that backward will ask once more for a stretch."""
        moved.num_expected += 1
        self._moved.append(weakref.ref(moved))

    def send(self) -> None:
        """Begin to move everything out."""
        for moved in self._alive():
            moved.send()

    def settle(self) -> None:
        """Release the device's memory of everything."""
        for moved in self._alive():
            moved.settle()

    def reach(self) -> None:
        """Note that backward has come here: this is needed now, and the block before it next."""
        if not self._is_reached:
            self._is_reached = True
            self._bring()
            if self._previous is not None:
                self._previous._bring()

    def _bring(self) -> None:
        for moved in reversed(self._alive()):
            moved.bring()

    def _alive(self) -> list[_Moved]:
        return [moved for ref in self._moved if (moved := ref()) is not None]


@dataclass(frozen=True, slots=True)
class _Handle:
    """What autograd keeps in place of a saved tensor: a view of a stretch."""

    moved: _Moved
    visit: _Visit
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements between the beginning of the stretch and that of the view."""


class _Offloading:
    """Move what blocks save. Nothing here looks at values, so that fake tensors serve as well."""

    def __init__(self, session: Session, storage: Storage, min_tensor_bytes: int) -> None:
        self._session = session
        self._storage = storage
        self._min_tensor_bytes = min_tensor_bytes
        self._has_shards = has_shards(session.model)
        self._last: _Visit | None = None
        self._owned: set[int] = set()
        self._known: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[_Moved]]] = {}

    def begin_forward(self) -> AbstractContextManager[None]:
        """Begin a new chain of blocks, and see which memory parameters and buffers have."""
        model = self._session.model
        self._owned = storages_of((*model.parameters(), *model.buffers()))
        self._known.clear()
        self._last = None
        self._storage.begin_forward()
        return nullcontext()

    def run(
        self,
        module: str,
        block: torch.nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a block's forward; meanwhile the block before it leaves the device."""
        if not torch.is_grad_enabled() or is_recomputed_later():
            return forward(*args, **kwargs)
        previous, visit = self._last, _Visit(module, block, self._last)
        self._last = visit
        if previous is not None:
            with torch.no_grad():
                previous.send()
        with saved_tensors_hooks(partial(self._pack, visit), self._unpack):
            out = forward(*args, **kwargs)
        if previous is not None:
            previous.settle()
        return out

    def close(self) -> None:
        """Release everything that is kept elsewhere."""
        self._known.clear()
        self._last = None
        self._storage.close()

    def _pack(self, visit: _Visit, tensor: torch.Tensor) -> torch.Tensor | _Handle:
        if not self._can_be_moved(tensor) or self._is_gathered(visit.block, tensor):
            return tensor
        start, length = _stretch(tensor)
        if length * tensor.element_size() < self._min_tensor_bytes:
            return tensor
        moved = self._moved(visit, tensor, start, length)
        visit.add(moved)
        offset = int(tensor.storage_offset()) - start
        return _Handle(moved, visit, tensor.shape, tensor.stride(), offset)

    def _unpack(self, packed: torch.Tensor | _Handle) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        with torch.no_grad():
            if self._storage.comes_ahead:
                packed.visit.reach()
            flat = packed.moved.take()
            start = flat.storage_offset()
            return flat.as_strided(packed.shape, packed.stride, start + packed.offset)

    def _can_be_moved(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) in _PLAIN
            and tensor.layout is torch.strided
            and tensor.device.type == self._session.device_type
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage()._cdata not in self._owned
        )

    def _is_gathered(self, block: torch.nn.Module, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter that ranks gather, and give back by themselves.

        The parameters of a block are such ones while its forward runs, and shards otherwise.
        """
        if not self._has_shards:
            return False
        return tensor.untyped_storage()._cdata in storages_of(block.parameters())

    def _moved(self, visit: _Visit, tensor: torch.Tensor, start: int, length: int) -> _Moved:
        """Get the stretch behind a tensor: the same one for as long as its values are the same."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, start, length, tensor.dtype)
        known_storage, known = self._known.get(key, (None, None))
        if known_storage is not None and known is not None and known_storage() is storage:
            moved = known()
            if moved is not None:
                return moved
        with torch.no_grad():
            flat = tensor.detach().as_strided((length,), (1,), start)
        moved = _Moved(flat, visit.module, self._storage, self._session.spill)
        self._known[key] = (weakref.ref(storage), weakref.ref(moved))
        return moved


def _is_given_back(flat: torch.Tensor) -> bool:
    """Return whether a tensor's memory is no longer there: ranks have given what they gathered."""
    return flat.numel() > 0 and flat.untyped_storage().nbytes() == 0


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first element and the number of elements to move for a tensor.

    That is the tensor's own range where it fills it, and the whole storage where it does not: the
    rest is then other parts that are saved too, as in queries, keys and values of one projection.
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    if span <= tensor.numel():
        return int(tensor.storage_offset()), span
    return 0, tensor.untyped_storage().nbytes() // tensor.element_size()
