"""Keeps a step's batch as it was given: its tensors, its containers, and objects that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.live_state import LiveState, Obstacle, Snapshot
from memfit.live_state.findings import PLAIN_TYPES
from memfit.live_state.tensors import KeptGrad, KeptTensor, keep, put_back
from memfit.runtime.guard.batch_file import BatchFile, StoredBatch
from memfit.runtime.guard.fingerprint import Fingerprint, places_of
from memfit.session.leaves import is_plain_tuple, leaves_of, tensors_in


@dataclass(slots=True, kw_only=True)
class BatchRecord:
    """One batch, as it was when its step began."""

    batch: Any
    """The object that was given; None once only its stored content is needed."""
    stored: StoredBatch | None
    """Where the tensors' content lies; None where it was not stored."""
    fingerprint: Fingerprint | None
    """Where the content was not stored."""
    tensors: list[KeptTensor]
    """Their forms and flags."""
    grads: list[KeptGrad | None]
    containers: tuple[tuple[Any, Any], ...]
    """Lists and dicts of the batch, with copies."""
    whole: Snapshot | None
    """Of a batch that is made up of other things than tensors, tuples, lists and dicts."""
    objects: Snapshot | None
    """Of what is neither a tensor nor a plain value."""
    obstacles: tuple[Obstacle, ...] = field(default=())

    def put_back(self, file: BatchFile | None) -> bool:
        """Make the batch what it was; say whether that was possible."""
        for container, copy in self.containers:
            _refill(container, copy)
        if self.whole is not None:
            self.whole.restore()
        for kept, grad in zip(self.tensors, self.grads, strict=True):
            _put_form_back(kept, grad)
        if self.stored is not None and file is not None:
            file.put_back(self.stored, [kept.tensor for kept in self.tensors])
            return True
        return not self.has_changed()

    def has_changed(self) -> bool:
        """Return whether the tensors are not what they were, as far as that can be seen."""
        return self.fingerprint != Fingerprint.of_batch([kept.tensor for kept in self.tensors])

    def for_repeating(self, file: BatchFile | None) -> Any:
        """Return the batch for its step to be run again."""
        if self.objects is not None:
            self.objects.restore()
        if self.stored is None or file is None:
            return self.batch
        return file.load(self.stored)

    def is_changed_for_good(self) -> bool:
        """Return whether the batch cannot be given once more."""
        return self.stored is None and self.has_changed()

    def drop_what_is_stored(self) -> None:
        """Hold on to nothing but what repeating takes."""
        if self.stored is not None:
            self.batch, self.tensors, self.grads = None, [], []
        self.containers, self.whole = (), None


class BatchRecorder:
    """Record one batch after another."""

    def __init__(self, store: Callable[[Any], StoredBatch | None]) -> None:
        self._store = store

    def recorded(self, batch: Any) -> BatchRecord:
        """Record a batch; stores its tensors where that is not too dear."""
        tensors = tensors_in(batch)
        containers = tuple(_containers(batch))
        others = _others(batch)
        objects = LiveState({"batch": others}) if others else None
        is_known = _is_known(batch)
        whole = None if is_known else LiveState({"batch": batch}, leave_out=tensors)
        stored = self._store(batch)
        return BatchRecord(
            batch=batch,
            stored=stored,
            fingerprint=Fingerprint.of_batch(tensors) if stored is None else None,
            tensors=[keep(tensor, with_form=True) for tensor in tensors],
            grads=[
                None if each.grad is None else KeptGrad.of(each.grad, torch.cat) for each in tensors
            ],
            containers=containers if is_known else (),
            whole=whole.snapshot() if whole is not None else None,
            objects=objects.snapshot() if objects is not None else None,
            obstacles=objects.obstacles if objects is not None else (),
        )


def _put_form_back(kept: KeptTensor, grad: KeptGrad | None) -> None:
    """Give a tensor its form, flags and gradient; its content comes from the file."""
    tensor = kept.tensor
    if not tensor.is_inference():
        kept.version = tensor._version
    put_back(kept)
    if tensor.is_leaf:
        tensor.grad = None if grad is None else grad.grad
    if grad is not None:
        grad.put_back()


def has_been_told_of_change(record: BatchRecord) -> bool:
    """Return whether autograd was told of a change since the step began."""
    tensors = [kept.tensor for kept in record.tensors]
    return record.fingerprint is not None and record.fingerprint.places != places_of(tensors)


def _containers(batch: Any) -> Iterator[tuple[Any, Any]]:
    kind = type(batch)
    if is_plain_tuple(kind):
        for each in batch:
            yield from _containers(each)
    elif kind is list:
        yield batch, [*batch]
        for each in batch:
            yield from _containers(each)
    elif kind is dict:
        yield batch, dict(batch)
        for each in batch.values():
            yield from _containers(each)


def _is_known(batch: Any) -> bool:
    """Return whether a batch is made up of tensors, plain values, tuples, lists and dicts."""
    kind = type(batch)
    if kind is torch.Tensor or kind in PLAIN_TYPES:
        return True
    if kind is list or is_plain_tuple(kind):
        return all(map(_is_known, batch))
    return kind is dict and all(map(_is_known, batch.values()))


def _others(batch: Any) -> list[Any]:
    """List what a batch holds besides tensors and plain values."""
    if type(batch) is torch.Tensor:
        return []
    return [
        leaf
        for leaf in leaves_of(batch)
        if not isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN_TYPES
    ]


def _refill(container: Any, copy: Any) -> None:
    if isinstance(container, list):
        container[:] = copy
    else:
        container.clear()
        container.update(copy)
