"""Puts fake tensors on a virtual GPU, with any build of torch and no compiled code.

A tensor of the virtual GPU has three faces. To Python it lies on ``cuda:0``: that is what
``device`` and ``is_cuda`` say, and fake tensors refuse to mix it with tensors of the CPU. To C++ it
lies on the meta device, the one device besides the CPU that every build of torch carries:
autograd's engine asks the device for streams, which a build without CUDA cannot answer. Its
dispatch keys are the CPU's, which have autograd and autocast of their own; where CUDA would choose
other operators, ``memfit.virtual.cuda.operators`` puts them there.

C++ passes the device on where it makes a tensor like another one. The card's meta device has a
number of its own, so that ``device_meant`` can tell it from the meta device of user code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _device

from memfit.errors import RecordingError
from memfit.virtual.process_group import current_placement

CARD = torch.device("cuda", 0)
_CPU = torch.device("cpu")
META_OF_CARD = torch.device("meta", 7)
_DEVICE_KEYWORDS = ("device", "fake_device", "_fake_device")
_PLACE_OF_DEVICE = 2
_NO_DATA = (
    "Cannot copy out of meta tensor; no data! Use torch.nn.Module.to_empty() instead of "
    "torch.nn.Module.to() to move a module from the meta device."
)
_TO_COPY = torch.ops.aten._to_copy
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "zeros",
    "zeros_like",
)


def is_on_card(tensor: object) -> bool:
    """Return whether a value is a tensor of the virtual GPU."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def device_meant(device: torch.device | str | int) -> torch.device:
    """Read a device as user code or C++ names it.

    Raises:
        RecordingError: for a second GPU; one step on one card is recorded.
    """
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device == META_OF_CARD:
        return CARD
    if device.type == "cuda":
        if device.index and not _is_of_this_rank(device.index):
            raise RecordingError(
                f"The step uses {device}, and the virtual GPU is a single card",
                "Put everything on cuda:0 to predict one card.",
            )
        return CARD
    return device


def _is_of_this_rank(index: int) -> bool:
    """Return whether a number names the card of the rank that is recorded, on its machine."""
    placement = current_placement()
    return placement is not None and index == placement.local_rank


def device_told_to_cpp(tensor: FakeTensor) -> torch.device:
    """Return the device that C++ is told."""
    return META_OF_CARD if is_on_card(tensor) else tensor.fake_device


def with_device_meant(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the device among an operator's keyword arguments by the one that is meant."""
    device = kwargs.get("device")
    if device is None or device.type == "cpu":
        return kwargs
    return {**kwargs, "device": device_meant(device)}


def placement() -> Iterator[Any]:
    """Yield the replacements that give tensors of the virtual GPU their faces."""
    yield patch.object(FakeTensor, "__new__", staticmethod(_make_fake))
    faces = {
        "is_cuda": is_on_card,
        "is_cpu": lambda tensor: tensor.fake_device.type == "cpu",
        "is_meta": lambda tensor: tensor.fake_device.type == "meta",
    }
    for name, face in faces.items():
        yield patch.object(FakeTensor, name, property(face), create=True)
    methods = {
        "to": _to,
        "cuda": _cuda,
        "cpu": _cpu,
        "get_device": _device_index,
        "new_tensor": _new_tensor,
        "type": _type,
        "pin_memory": _pinned,
        "record_stream": _unchanged,
    }
    for name, method in methods.items():
        yield patch.object(torch.Tensor, name, method, create=True)
    yield from _numbered_devices()


def _numbered_devices() -> Iterator[Any]:
    """Let a number name the card, which C++ reads only where there is an accelerator."""
    # Torch remembers its factories at their first use: these must not be the replaced ones.
    _device._device_constructors()
    for name in _FACTORIES:
        yield patch.object(torch, name, _with_device_named(getattr(torch, name)))
    yield patch.object(torch, "tensor", _copied_afterwards(torch.tensor))
    for name in ("as_tensor", "asarray"):
        yield patch.object(torch, name, _placed_afterwards(getattr(torch, name)))
    parse = torch._C._nn._parse_to

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        return parse(*(_named(value) for value in args[:1]), *args[1:], **_with_name(kwargs))

    yield patch.object(torch._C._nn, "_parse_to", parse_to)
    yield patch.object(torch, "Generator", _Generator)


def _named(device: Any) -> Any:
    """Spell a device that is given by its number; anything else stays."""
    return torch.device("cuda", device) if type(device) is int else device


def _with_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Spell the device among keyword arguments."""
    return {**kwargs, "device": _named(kwargs["device"])} if "device" in kwargs else kwargs


def _with_device_named(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        return factory(*args, **_with_name(kwargs))

    return make


def _copied_afterwards(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Move what was made from an array to its device by way of dispatch, which C++ leaves out."""

    @functools.wraps(factory)
    def make(data: Any, *, requires_grad: bool = False, **kwargs: Any) -> Any:
        kwargs = _with_name(kwargs)
        if not isinstance(data, np.ndarray) or kwargs.get("device") is None:
            return factory(data, requires_grad=requires_grad, **kwargs)
        made = _to(factory(data, **{**kwargs, "device": _CPU}), kwargs["device"])
        return made.requires_grad_(requires_grad)

    return make


def _placed_afterwards(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Move what was made from arrays to its device by way of dispatch, which C++ leaves out."""

    @functools.wraps(factory)
    def make(data: Any, *, device: Any = None, **kwargs: Any) -> Any:
        if isinstance(data, torch.Tensor):
            place = data.device if device is None else device
            return _to(data, place, kwargs.get("dtype"), copy=bool(kwargs.get("copy")))
        place = torch.get_default_device() if device is None else device
        return _to(factory(data, **kwargs, device=_CPU), place)

    return make


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]  # it has a type of its own
    """Have torch's own generators pass as generators while the name is replaced."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _generator_as_torch_makes_it)


_generator_as_torch_makes_it = torch.Generator


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """A random generator of the card: fake tensors draw nothing, so that the CPU's will do."""

    def __new__(cls, device: torch.device | str | int = "cpu") -> Any:
        if device_meant(device) != CARD:
            return _generator_as_torch_makes_it(torch.device(device))
        return _generator_as_torch_makes_it.__new__(cls, "cpu")  # type: ignore[call-arg]

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # the annotation says writeable
        """Return the card."""
        return CARD


_fake_as_torch_makes_it = FakeTensor.__new__
_to_as_torch_does_it = torch.Tensor.to
_USUAL: Any = torch.Tensor.__torch_function__
_new_tensor_as_torch_does_it = torch.Tensor.new_tensor
_type_as_torch_does_it = torch.Tensor.type


def _make_fake(cls: type[FakeTensor], *args: Any, **kwargs: Any) -> FakeTensor:
    """Make a fake tensor; one of the card gets the CPU's dispatch keys."""
    found = dict(enumerate(args)).get(_PLACE_OF_DEVICE)
    for name in _DEVICE_KEYWORDS:
        found = kwargs.get(name, found) if found is None else found
    if found is None or torch.device(found).type != "cuda":
        return _fake_as_torch_makes_it(cls, *args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in _DEVICE_KEYWORDS}
    if len(args) > _PLACE_OF_DEVICE:
        args = (*args[:_PLACE_OF_DEVICE], _CPU, *args[_PLACE_OF_DEVICE + 1 :])
    else:
        kwargs["device"] = _CPU
    tensor = _fake_as_torch_makes_it(cls, *args, **kwargs)
    tensor.fake_device = device_meant(found)
    return tensor


class _TakenFor:
    """Stand in for a method of torch for classes that look it up to do it in their own way."""

    def __init__(self, method: Any, stand_in: Callable[..., torch.Tensor]) -> None:
        self._method, self._stand_in = method, stand_in

    def __hash__(self) -> int:
        return hash(self._method)

    def __eq__(self, other: object) -> bool:
        return other is self._method or other is self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._stand_in(*args, **kwargs)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand in for ``Tensor.to``; a class that moves in its own way goes on doing so.

    NF4 weights of torchao do: by torch's operators alone they would be unpacked.
    """
    kind = type(tensor)
    own = getattr(kind.__torch_function__, "__func__", None)
    if own in {None, _USUAL.__func__} or isinstance(tensor, FakeTensor):
        return _to_plainly(tensor, *args, **kwargs)
    method: Any = _TakenFor(_to_as_torch_does_it, _to_plainly)
    moved: torch.Tensor = kind.__torch_function__(method, (kind,), (tensor, *args), kwargs)
    return moved


def _to_plainly(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Move or convert a tensor; the C++ side of ``Tensor.to`` compares the wrong devices."""
    options = _options_of_to(args, kwargs)
    device = options.pop("device", None)
    if device is None or device_meant(device) == tensor.device:
        wanted = {name: value for name, value in options.items() if value is not None}
        return _to_as_torch_does_it(tensor, **wanted) if wanted else tensor
    if tensor.device.type == "meta":
        raise NotImplementedError(_NO_DATA)
    dtype = options.get("dtype") or tensor.dtype
    moved: torch.Tensor = _TO_COPY(
        tensor,
        dtype=dtype,
        device=device_meant(device),
        non_blocking=bool(options.get("non_blocking")),
        memory_format=options.get("memory_format"),
    )
    return moved


def _options_of_to(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the arguments of ``Tensor.to``, which come in three orders, by name."""
    options = dict(kwargs)
    other = options.pop("other", None)
    rest = list(args)
    if rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
    if other is not None:
        options.update(device=other.device, dtype=other.dtype)
    if rest and (isinstance(rest[0], (str, torch.device)) or type(rest[0]) is int):
        options["device"] = rest.pop(0)
    elif rest and rest[0] is None:
        rest.pop(0)
    if rest and isinstance(rest[0], torch.dtype):
        options["dtype"] = rest.pop(0)
    elif rest and rest[0] is None:
        rest.pop(0)
    options.update(zip(("non_blocking", "copy"), rest, strict=False))
    return options


def _cuda(
    tensor: torch.Tensor,
    device: torch.device | str | int | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    place = CARD if device is None else device_meant(device)
    return _to(tensor, place, non_blocking=non_blocking, memory_format=memory_format)


def _cpu(tensor: torch.Tensor, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    return _to(tensor, _CPU, memory_format=memory_format)


def _device_index(tensor: torch.Tensor) -> int:
    return 0 if is_on_card(tensor) else -1


def _new_tensor(tensor: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
    """Stand in for ``Tensor.new_tensor``, whose C++ side puts the values on the CPU."""
    if not is_on_card(tensor):
        return _new_tensor_as_torch_does_it(tensor, data, **kwargs)
    return torch.tensor(data, **{"dtype": tensor.dtype, "device": CARD, **kwargs})


def _type(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Stand in for ``Tensor.type``, which names and makes legacy types such as cuda.FloatTensor."""
    if dtype is None:
        name = str(_type_as_torch_does_it(tensor))
        return name.replace("torch.", "torch.cuda.", 1) if is_on_card(tensor) else name
    if isinstance(dtype, torch.dtype):
        return _to(tensor, dtype, non_blocking)
    name = dtype if isinstance(dtype, str) else torch.typename(dtype)
    module, _, kind = name.rpartition(".")
    place = CARD if module == "torch.cuda" else _CPU
    return _to(tensor, place, getattr(torch, kind).dtype, non_blocking)


def _pinned(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """Return a copy, as pinning makes one; memory of the card stays where it is."""
    return tensor if is_on_card(tensor) else tensor.clone()


def _unchanged(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor
