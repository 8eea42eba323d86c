"""``DistributedDataParallel`` on fake tensors: its buckets, without the reducer that is in C++.

Source: torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp, torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._utils import _flatten_dense_tensors
from torch.utils._pytree import tree_map_only

from memfit.errors import RecordingError
from memfit.trace.events import Category
from memfit.trace.purposes import tell_purpose
from memfit.units import MIB

_FIRST_BUCKET_BYTES = MIB
_BUCKET_MIB = 25
"""dist._DEFAULT_FIRST_BUCKET_BYTES and bucket_cap_mb of DistributedDataParallel, torch 2.13."""
_BROADCAST_BYTES = 250 * MIB
"""``broadcast_bucket_size``: how much is flattened at once to give all ranks the same states."""
_NOT_FOLLOWED = ("mixed_precision", "delay_all_reduce_named_params", "bucket_cap_mb_list")


def data_parallel() -> Iterator[Any]:
    """Yield the replacements with which ``DistributedDataParallel`` runs on fake tensors."""
    if not torch.distributed.is_available():
        return
    methods = {
        "__init__": _wrap,
        "forward": _forward,
        "no_sync": _no_sync,
        "register_comm_hook": _refuse_hook,
    }
    for name, method in methods.items():
        yield patch.object(torch.nn.parallel.DistributedDataParallel, name, method)


def _wrap(
    wrapper: Any,
    module: torch.nn.Module,
    *_args: Any,
    gradient_as_bucket_view: bool = False,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    broadcast_buffers: bool = True,
    **options: Any,
) -> None:
    """Stand in for the constructor of ``DistributedDataParallel``.

    Raises:
        RecordingError: if an option is asked for whose memory is not followed.
    """
    for name in _NOT_FOLLOWED:
        if options.get(name):
            raise RecordingError(
                f"DistributedDataParallel is asked for {name}, whose memory is not followed",
                "Leave it out, or measure the step on its ranks.",
            )
    torch.nn.Module.__init__(wrapper)
    wrapper.module = module
    wrapper.require_backward_grad_sync = True
    wrapper.broadcast_buffers = broadcast_buffers
    wrapper.clones_outputs = find_unused_parameters and not static_graph
    if options.get("init_sync", True):
        _broadcast([*module.parameters(), *module.buffers()])
    wrapper.reducer = _Reducer(
        wrapper,
        limits_bytes=_limits(options),
        is_view=gradient_as_bucket_view,
        is_bucketed_at_once=find_unused_parameters and not static_graph,
    )


def _forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the module, with new buckets where they are due."""
    if torch.is_grad_enabled():
        wrapper.reducer.prepare()
    if wrapper.broadcast_buffers and wrapper.require_backward_grad_sync:
        _broadcast([*wrapper.module.buffers()])
    out = wrapper.module(*args, **kwargs)
    if wrapper.clones_outputs and torch.is_grad_enabled():
        return tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), out)
    return out


@contextmanager
def _no_sync(wrapper: Any) -> Iterator[None]:
    """Keep gradients to this process for a while."""
    before = wrapper.require_backward_grad_sync
    wrapper.require_backward_grad_sync = False
    try:
        yield
    finally:
        wrapper.require_backward_grad_sync = before


def _refuse_hook(_wrapper: Any, _state: object, hook: Any) -> None:
    name = getattr(hook, "__name__", str(hook))
    if name != "allreduce_hook":
        raise RecordingError(
            f"DistributedDataParallel is given the communication hook {name}, whose memory is not "
            "followed",
            "Leave it out, or measure the step on its ranks.",
        )


def _broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Take what ``broadcast_coalesced`` takes: flat copies, two at a time."""
    in_flight: list[torch.Tensor] = []
    with torch.no_grad():
        for group in _groups(tensors, [_BROADCAST_BYTES]):
            flat = _flatten_dense_tensors([tensor.detach() for tensor in group])
            if len(group) > 1:
                tell_purpose(flat, Category.COMMUNICATION)
            in_flight = [*in_flight[-1:], flat]


def _groups(
    tensors: Sequence[torch.Tensor], limits_bytes: Sequence[int]
) -> list[list[torch.Tensor]]:
    """Put tensors in groups, each of one type and closed once it has reached its limit.

    Source: ``compute_bucket_assignment_by_size`` in reducer.cpp.
    """
    done: list[list[torch.Tensor]] = []
    open_groups: dict[Any, list[torch.Tensor]] = {}
    num_closed: dict[Any, int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        group = open_groups.setdefault(key, [])
        group.append(tensor)
        limit = limits_bytes[min(num_closed.get(key, 0), len(limits_bytes) - 1)]
        if sum(each.numel() * each.element_size() for each in group) >= limit:
            done.append(open_groups.pop(key))
            num_closed[key] = num_closed.get(key, 0) + 1
    return done + list(open_groups.values())


def _limits(options: Mapping[str, Any]) -> list[int]:
    """Return what ends the first bucket and the others."""
    cap = options.get("bucket_cap_mb")
    if cap is None:
        return [_FIRST_BUCKET_BYTES, _BUCKET_MIB * MIB]
    return [int(cap * MIB)]


class _Reducer:
    """The buckets in which gradients are added up over the ranks.

    The first step has one bucket for all, unless it looks for unused parameters. The second forward
    makes them anew, in the order in which gradients came.
    """

    def __init__(
        self, wrapper: Any, *, limits_bytes: list[int], is_view: bool, is_bucketed_at_once: bool
    ) -> None:
        self._wrapper = wrapper
        self._is_view = is_view
        self._limits_bytes = limits_bytes
        self._is_rebuilt = is_bucketed_at_once
        self._views: dict[torch.Tensor, torch.Tensor] = {}
        self._ready: dict[torch.Tensor, None] = {}
        trained = [each for each in wrapper.module.parameters() if each.requires_grad]
        self._make(trained, self._limits_bytes if is_bucketed_at_once else [sys.maxsize])
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._take)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reducer:
        """Stay the same: a copy of the wrapper has no reducer of its own that would be asked."""
        return self

    def prepare(self) -> None:
        """Make the buckets anew where that is due, or where the parameters have moved."""
        has_moved = any(view.device != each.device for each, view in self._views.items())
        if self._ready and not self._is_rebuilt:
            self._is_rebuilt = True
            self._make([*self._ready], self._limits_bytes)
        elif has_moved:
            self._make([*self._views], self._limits_bytes if self._is_rebuilt else [sys.maxsize])

    def _make(self, parameters: Sequence[torch.Tensor], limits_bytes: Sequence[int]) -> None:
        """Make the buckets of some parameters; the old ones go first."""
        self._views.clear()
        purpose = Category.GRADIENTS if self._is_view else Category.COMMUNICATION
        for group in _groups(parameters, limits_bytes):
            sizes = [each.numel() for each in group]
            with torch.no_grad():
                bucket = torch.empty(sum(sizes), dtype=group[0].dtype, device=group[0].device)
                tell_purpose(bucket, purpose)
                for parameter, flat in zip(group, bucket.split(sizes), strict=True):
                    self._views[parameter] = flat.view(parameter.shape)

    def _take(self, parameter: torch.Tensor) -> None:
        """Copy a gradient into its bucket; where gradients are views of buckets, it becomes one."""
        if not self._wrapper.require_backward_grad_sync or parameter.grad is None:
            return
        self._ready.setdefault(parameter)
        view = self._views.get(parameter)
        if view is None:
            return
        gradient = parameter.grad
        if gradient.untyped_storage()._cdata != view.untyped_storage()._cdata:
            with torch.no_grad():
                view.copy_(gradient)
            if self._is_view:
                parameter.grad = view
