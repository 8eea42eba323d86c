"""Fake tensors: a step is run with shapes only, so that an 8 B model takes megabytes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    _BypassDispatchCache,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.errors import RecordingError
from memfit.kernels.cpu_onednn_3_12 import CPU_OPERATORS
from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.operators import CUDA_OPERATORS
from memfit.kernels.registration import Rule, call_rule, names_argument
from memfit.trace.origins import OWN_FOLDERS
from memfit.trace.subclasses import is_left_to_a_class
from memfit.virtual.assumptions import Assumptions
from memfit.virtual.cache_keys import append_key
from memfit.virtual.cuda.autocast import VirtualAutocast
from memfit.virtual.cuda.distributed import distributed
from memfit.virtual.cuda.operators import cuda_choices
from memfit.virtual.cuda.placement import (
    CARD,
    device_told_to_cpp,
    placement,
    with_device_meant,
)
from memfit.virtual.cuda.runtime import runtime
from memfit.virtual.cuda.wrappers import wrappers
from memfit.virtual.own_fakes import OWN_FAKES
from memfit.virtual.repeated_results import key_of, learn, made_again
from memfit.virtual.replacements import replacements
from memfit.virtual.sparse_gradients import SparseGradients
from memfit.virtual.subclasses import FakeWrappers, is_nested_int, nested_int

_RANGES = (
    torch.ops.aten.linspace.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
)
_UNINITIALISED = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
ITEM = torch.ops.aten._local_scalar_dense.default
_ANY_VALUE = 1.0
_SAYS_NO_FAKE = "no fake impl registered"
_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_MOST_KNOWN_VALUES = 4096
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_NOTE = (
    "It asks for torch.compile, and the code is recorded as it was written: compiled, it usually "
    "takes less memory and time (`memfit measure` tells)"
)


class ValuesNeededError(RecordingError):
    """Say which operator needs the values of tensors."""


class VirtualTensors(FakeTensorMode):
    """Make fake tensors, and keep the values of small ones that depend on no input.

    Models look at such values: schedules (``[rate.item() for rate in torch.linspace(...)]``),
    positions, optimizer step counts. They need neither a batch nor noteworthy memory.
    """

    def __init__(self, *, has_card: bool = False, assumptions: Assumptions | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._sparse = SparseGradients(assumptions or Assumptions(), has_card=has_card)
        self._has_card = has_card
        self._fakes: dict[Any, Rule | None] = {}
        self.compiled_code = _CompiledCode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have operators come here without a detour: nothing is compiled meanwhile."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> Any:
        if is_left_to_a_class(types):
            return NotImplemented  # what it does to the tensors inside comes here
        if func is _DEVICE:
            return self.device_told_to_cpp(cast(FakeTensor, args[0]))
        if self._has_card and not self.in_kernel_invocation:
            kwargs = with_device_meant(kwargs)
        out = self._sparse.carry_out(self, func, args, kwargs)
        return self._make(func, types, args, kwargs) if out is NotImplemented else out

    def device_told_to_cpp(self, tensor: FakeTensor) -> torch.device:
        """Return the device of one of the mode's tensors that C++ is told."""
        return _META if self.in_kernel_invocation else device_told_to_cpp(tensor)

    def _make(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Any:
        """Make the fake results of an operator."""
        own = self._own_fake(func, args, kwargs)
        if own is not NotImplemented:
            return own
        args = _with_own_memory(func, args)
        if self._has_card and kwargs.get("device") == CARD:
            args = tuple(self._as_fake(value) for value in args)
        with _without_values(args) if kwargs.get("device") == CARD else nullcontext():
            out: Any = self._fake(func, types, args, kwargs)
        if func in _UNINITIALISED:
            # Torch would keep what happens to lie in memory, where it knows the argument's values.
            out.constant = None
        if func in _RANGES and _is_small_and_here(out):
            with no_dispatch():
                out.constant = func(*args, **{**kwargs, "device": "cpu"})
        own = self._own_fake(func, args, kwargs, out=out)
        return out if own is NotImplemented else own

    def _own_fake(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object], **out: Any
    ) -> Any:
        """Return the outputs of the device's own fake version, which may want those of torch's.

        ``NotImplemented`` where there is none, or torch's outputs are wanted and not there.
        """
        if func not in self._fakes:
            on_card = CUDA_OPERATORS.find(func) if self._has_card else None
            found = (on_card or CPU_OPERATORS.find(func), OWN_FAKES.find(func))
            fakes = [operator.fake for operator in found if operator and operator.fake]
            self._fakes[func] = fakes[0] if fakes else None
        fake = self._fakes[func]
        if fake is None or names_argument(fake, "out") != bool(out):
            return NotImplemented
        with self:
            return call_rule(fake, func, args, kwargs, **out)

    def _fake(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Any:
        """Make the results that torch's fake version gives; what was made before, in short."""
        key = None if self.in_kernel_invocation else key_of(self, func, args, kwargs)
        if key is None:
            return self._fake_as_torch_makes_it(func, types, args, kwargs)
        out = made_again(key, args, self)
        if out is NotImplemented:
            num_known = FakeTensorMode.cache_hits
            out = self._fake_as_torch_makes_it(func, types, args, kwargs)
            if FakeTensorMode.cache_hits == num_known + 1:
                learn(key, args, kwargs, out)
        return out

    def _fake_as_torch_makes_it(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Any:
        """Run torch's own fake version, and refuse what has none."""
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            # Truths decide what an optimizer does next, numbers only scale its update.
            is_number = func is ITEM and cast(torch.Tensor, args[0]).is_floating_point()
            if is_number and _is_asked_by_an_optimizer():
                return _ANY_VALUE
            raise
        except UnsupportedOperatorException:
            raise
        except FakeTensorDeviceMismatchError as error:
            raise RuntimeError(_devices_of(func, (args, tuple(kwargs.values())), error)) from error
        except RuntimeError as error:
            if _SAYS_NO_FAKE in str(error):
                raise UnsupportedOperatorException(func) from error
            raise
        if isinstance(out, torch.Tensor) and out.layout is not torch.strided:
            self._sparse.meet(func, out)
        return out

    @property
    def avoid_device_init(self) -> bool:
        """Have torch make tensors on the CPU and move them, as it does without a GPU."""
        return self._has_card or bool(super().avoid_device_init)

    def replacements(self) -> Iterable[Any]:
        """Return what is replaced in torch while the mode is active."""
        return ()

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> torch.SymInt:
        """Make the number that stands for a nested tensor's lengths, without torch's symbols."""
        self.nt_tensor_id_counter += 1
        return nested_int(self.nt_tensor_id_counter if nt_tensor_id is None else nt_tensor_id)

    def _as_fake(self, value: object) -> object:
        """Make a real tensor fake; anything else stays."""
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self.from_tensor(value)
        return value

    def _prep_args_for_hash(
        self, result: list[object], args: Any, state: Any, id_hashed_objects: list[object]
    ) -> None:
        """Describe arguments for torch's cache of fake results."""
        describe = super()._prep_args_for_hash

        def append_other(argument: object) -> None:
            # The cache would keep a storage alive.
            if is_nested_int(argument) or isinstance(argument, torch.UntypedStorage):
                raise _BypassDispatchCache("the lengths of a nested tensor, or a storage")
            describe(result, (argument,), state, id_hashed_objects)

        if isinstance(args, Mapping):
            result += args
            args = args.values()
        append_key(result, args, self, append_other)

    def may_turn_const(self, tensor: torch.Tensor) -> bool:
        """Keep the values of more than the single numbers that torch keeps."""
        return (
            tensor.numel() <= _MOST_KNOWN_VALUES
            and tensor.layout is torch.strided
            and not isinstance(tensor, FakeTensor)
            and tensor.device.type != "meta"
        )


@contextmanager
def virtual_tensors(
    card: Card | None = None,
    *,
    disguised: bool = True,
    make_mode: Callable[..., VirtualTensors] = VirtualTensors,
) -> Iterator[VirtualTensors]:
    """Make every tensor inside a fake one: it has a shape, a dtype and a device, and no memory.

    Args:
        card: the GPU that ``cuda`` means inside; without one there is none.
        disguised: have libraries that treat fake tensors specially take their usual path.
        make_mode: makes the mode, given whether it ``has_card``.

    Raises:
        ValuesNeededError: if the code inside needs the values of tensors.
        RecordingError: if an operator has no fake implementation.
    """
    mode = make_mode(has_card=card is not None)
    try:
        with ExitStack() as stack:
            # What fails is reported by whoever catches it, not by torch's log as well.
            stack.enter_context(patch.object(_FAKE_TENSOR_LOG, "disabled", True))
            for replacement in (*replacements(disguised=disguised), *mode.replacements()):
                stack.enter_context(replacement)
            stack.enter_context(mode.compiled_code.run_eagerly())
            if card is not None:
                _enter_card(stack, card)
            with mode:
                yield mode
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValuesNeededError(
            f"{_operator(error)} depends on the values of tensors, which are not there yet",
            "Take it out of the step (compute it with the batch, or with shapes only), or use "
            "`memfit measure`, which really runs the step.",
        ) from error
    except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
        raise RecordingError(
            f"{_operator(error)} has no fake implementation",
            "Register one with torch.library.register_fake, or use `memfit measure`.",
        ) from error


def _enter_card(stack: ExitStack, card: Card) -> None:
    """Put a virtual GPU into the machine."""
    autocast = VirtualAutocast(card.torch_version)
    parts = (placement(), runtime(card), autocast.replacements(), distributed(), wrappers())
    for part in parts:
        for replacement in part:
            stack.enter_context(replacement)
    stack.enter_context(cuda_choices(card, autocast))


def _is_asked_by_an_optimizer() -> bool:
    """Return whether torch's own optimizers want a value, which only scales their updates."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OPTIMIZERS):
            return True
        if not file.startswith(OWN_FOLDERS):
            return False
        frame = frame.f_back
    return False


def _is_small_and_here(tensor: object) -> bool:
    """Return whether a tensor of the CPU has few enough values to keep them."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.fake_device.type == "cpu"
        and tensor.numel() <= _MOST_KNOWN_VALUES
    )


@contextmanager
def _without_values(args: Sequence[object]) -> Iterator[None]:
    """Hide the values that are known of some tensors: those of the card's tensors are not kept."""
    known = [tensor for tensor in args if isinstance(tensor, FakeTensor)]
    values = [tensor.constant for tensor in known]
    for tensor in known:
        tensor.constant = None
    try:
        yield
    finally:
        for tensor, value in zip(known, values, strict=True):
            tensor.constant = value


def _with_own_memory(func: Any, args: Sequence[object]) -> Sequence[object]:
    """Copy what an operator changes in place where all is real: torch would really change it.

    They are constants to the recorded code, such as a teacher in a loss's closure.
    """
    if not func._schema.is_mutable:
        return args
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not tensors or any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return args
    with no_dispatch(), torch.no_grad():
        return tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in args)


def as_virtual(mode: FakeTensorMode, values: object) -> object:
    """Turn the real tensors in a pytree into fake ones; fake ones are made the mode's own."""
    wrappers = FakeWrappers(mode, partial(_one_as_virtual, mode))
    return tree_map_only(torch.Tensor, wrappers.fake, values)


def _one_as_virtual(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Make a fake tensor like another one, with a storage of its own."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _devices_of(func: Any, given: object, error: Exception) -> str:
    """Say which tensors lie where, as torch refuses it on a real GPU."""
    tensors = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
    places = ", ".join(f"{tuple(each.shape)} on {each.device}" for each in tensors)
    return (
        f"{str(error).rstrip('!')}: {func} is given tensors of shape {places}. A real GPU refuses "
        "them as well. Make them where the others are, with device=x.device, or move them with "
        ".to(x.device); register_buffer() has a module's tensors move with it"
    )


def _operator(error: Exception) -> str:
    func = getattr(error, "func", None)
    return f"The operator {func}" if func is not None else str(error)


class _CompiledCode:
    """Tell whether code asked to be compiled.

    Torch's compiler leaves code alone under a dispatch mode, and refuses where it was told to
    compile all of it (``fullgraph=True``), as torchao's optimizers do.
    """

    def __init__(self) -> None:
        self.was_asked_for = False
        """Whether ``torch.compile`` was called."""

    def notes(self, model: torch.nn.Module | None = None) -> Sequence[str]:
        """Say so where code is compiled otherwise, of the model's modules or while recording.

        Limits: functions that were compiled before are not noticed.
        """
        modules = () if model is None else model.modules()
        is_compiled = any(
            hasattr(each, "_torchdynamo_orig_callable") or each._compiled_call_impl is not None
            for each in modules
        )
        return (_NOTE,) if self.was_asked_for or is_compiled else ()

    @contextmanager
    def run_eagerly(self) -> Iterator[None]:
        """Run compiled code as it was written inside.

        What was compiled before is run eagerly. What would be compiled inside is left as it is: the
        compiler looks torch's functions up once and for all, and some of them are replaced here.
        """
        with ExitStack() as stack:
            if "torch._dynamo.eval_frame" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(patch.object(torch, "compile", self._leave))
            yield

    def _leave(self, model: Any = None, **options: Any) -> Any:
        """Return a function or a module uncompiled; without one, what does so."""
        self.was_asked_for = True
        if model is None:
            return partial(self._leave, **options)
        if isinstance(model, torch.nn.Module):
            vars(model)["_orig_mod"] = model  # where code looks for the module that was compiled
        return model
