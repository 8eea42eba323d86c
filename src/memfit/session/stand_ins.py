"""Has other tensors stand in for living ones, under the same identity, and takes them out again.

A job may bring a model that already lives. Whoever holds one of its tensors (optimizer, hooks,
closures, tied layers) then finds a stand-in in its place: a fake tensor while a step is recorded, a
copy while one is measured, a copy in fp64 while one is verified. Memory, autograd metadata and
version of the original are not touched meanwhile, so nothing has to be restored afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from memfit.errors import HeldTensorError
from memfit.trace.subclasses import statistics_of
from memfit.virtual.exchange import exchange, take_along_hooks
from memfit.virtual.four_bit import is_packed

Maker = Callable[[torch.Tensor], torch.Tensor]
"""Makes the memory of stand-ins from a flat view of the whole memory of some originals."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class _Pair(NamedTuple):
    """A tensor, and what has its identity or, at the end, had it."""

    tensor: torch.Tensor
    stand_in: torch.Tensor
    may_go: bool


class StandIns:
    """Put tensors in the places of others for a while; tensors that share memory go on doing so.

    Tensor hooks (``register_hook``, ``register_post_accumulate_grad_hook``) come along. Gradients
    do not: a stand-in begins without.

    Limits: hooks on a parameter's ``AccumulateGrad`` node, as DistributedDataParallel has them, do
    not see the stand-in. A stand-in that is fake has lost the class of a subclass of ``Parameter``.
    A tensor in the middle of an autograd graph is cut off from it.
    Source: the exchange is the one of ``torch.utils.swap_tensors``, without its lasting effects.
    """

    def __init__(self, make: Maker) -> None:
        self._make = make
        self._pairs: dict[int, _Pair] = {}
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        """Flat views that keep the originals' memory, and so its address, to themselves."""

    @property
    def count(self) -> int:
        """Count the tensors that have a stand-in."""
        return len(self._pairs)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a stand-in is in the place of a tensor."""
        return id(tensor) in self._pairs

    def take_places(
        self, tensors: NamedTensors, *, may_go: bool = False, make: Maker | None = None
    ) -> None:
        """Replace tensors by stand-ins; those that are replaced already are left alone.

        Args:
            tensors: with names, for messages. Tensor subclasses that consist of other tensors are
                replaced part by part.
            may_go: whether ``gone`` may list them.
            make: makes the memory of these instead.

        Raises:
            HeldTensorError: if a tensor cannot be replaced.
        """
        torch.clear_autocast_cache()  # it holds on to the originals
        for name, tensor in _parts(tensors):
            if id(tensor) not in self._pairs:
                stand_in = self._stand_in(tensor, make or self._make)
                _exchange(name, tensor, stand_in)
                self._pairs[id(tensor)] = _Pair(tensor, stand_in, may_go)

    def settle(self) -> None:
        """Let go of memory that no stand-in needs; tensors replaced later share none with these."""
        self._memory.clear()

    def gone(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """List those with a stand-in that may go and that are not among these tensors."""
        kept = {id(tensor) for tensor in tensors}
        return [p.tensor for key, p in self._pairs.items() if p.may_go and key not in kept]

    def put_back_early(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put originals back that others have replaced: their memory would be counted."""
        for tensor in tensors:
            pair = self._pairs.pop(id(tensor))
            _exchange("", pair.tensor, pair.stand_in)

    def put_back(self) -> None:
        """Put the originals back."""
        torch.clear_autocast_cache()
        while self._pairs:
            _, pair = self._pairs.popitem()
            _exchange("", pair.tensor, pair.stand_in)
        self._memory.clear()
        self._originals.clear()

    def _stand_in(self, tensor: torch.Tensor, make: Maker) -> torch.Tensor:
        with torch.no_grad():
            data = self._data(tensor, make)
        is_leaf_to_train = tensor.requires_grad and tensor.is_leaf
        if isinstance(tensor, torch.nn.Parameter):
            stand_in = _as_parameter(tensor, data)
        else:
            stand_in = data if type(data) is FakeTensor else data.as_subclass(type(tensor))
        take_along_hooks(tensor, stand_in)
        stand_in.requires_grad_(is_leaf_to_train)
        for name, value in vars(tensor).items():
            stand_in.__dict__.setdefault(name, value)
        return stand_in

    def _data(self, tensor: torch.Tensor, make: Maker) -> torch.Tensor:
        """Make the values of a stand-in, in memory that is shared as the original's is."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return make(tensor.detach())
        if isinstance(tensor, FakeTensor):  # of a recording that is over
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        key = (tensor.untyped_storage()._cdata, tensor.dtype)
        if key not in self._memory:
            whole = _whole_memory(tensor)
            self._originals.append(whole)
            self._memory[key] = make(whole)
        return (
            self._memory[key]
            .as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            .detach()
        )


def module_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a model and its modules hold, with names.

    Parameters, buffers, and those in attributes: by themselves, in lists, tuples and dictionaries.
    """
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                yield from _nested(prefix, value)
            elif not isinstance(value, torch.nn.Module) and name != "_modules":
                yield from _nested(f"{prefix}.{name}" if prefix else name, value)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that an optimizer holds: its parameters, its states, its settings."""
    for group in optimizer.param_groups:
        yield from _nested("the optimizer's group", group)
    for state in optimizer.state.values():
        yield from _nested("the optimizer's state", state)


def living(*kinds: type) -> list[Any]:
    """List every object of some types that Python's collector knows of.

    Hold on to the list as long as identities are compared with those of what is made later.
    """
    # There are millions of objects and few types; these may refuse to be hashed.
    is_wanted: dict[int, bool] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        wanted = is_wanted.get(id(kind))
        if wanted is None:
            wanted = is_wanted[id(kind)] = issubclass(kind, kinds)
        if wanted:
            found.append(each)
    return found


def _nested(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _nested(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _nested(name, item)


def _parts(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Take apart tensors that consist of others."""
    for name, tensor in tensors:
        if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, FakeTensor):
            inner, _ = tensor.__tensor_flatten__()
            held = ((f"{name}.{part}", getattr(tensor, part)) for part in inner)
            # Some name what is no tensor as well: DTensor its mesh of devices.
            yield from _parts((place, part) for place, part in held if torch.is_tensor(part))
        elif not tensor.is_meta or isinstance(tensor, FakeTensor):
            yield name, tensor
            yield from ((name, each) for each in statistics_of(tensor))


def _whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of everything that lies in a tensor's memory."""
    with _disable_current_modes(), torch.no_grad():
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def _as_parameter(tensor: torch.nn.Parameter, data: torch.Tensor) -> torch.Tensor:
    if isinstance(data, FakeTensor) and not is_packed(tensor):
        return torch.nn.Parameter(data, requires_grad=False)
    made: torch.Tensor = torch.Tensor._make_subclass(type(tensor), data, False)
    return made


def _exchange(name: str, first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange everything but the identity of two tensors.

    Raises:
        HeldTensorError: if something in torch holds on to one of them.
    """
    try:
        exchange(first, second)
    except (RuntimeError, TypeError) as error:
        raise HeldTensorError(name, str(error).partition("\n")[0]) from error
