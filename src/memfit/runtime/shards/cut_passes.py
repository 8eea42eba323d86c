"""Puts back what a pass that was cut has left inside a model sharded by FSDP2.

Read from torch 2.13 (torch/distributed/fsdp/_fully_shard: ``FSDPState._reset_iter_state``, which
``FSDPModule.reset_iter_state`` offers, ``FSDPParamGroup`` and ``FSDPParam``). That function waits
for collectives, and leaves whole gradients that were not reduced yet, and buffers of a gather that
was cut between its collective and its copies; both are put back here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


class CutPasses:
    """Bring a model back to where no pass is under way; nothing is done to one that is whole.

    Args:
        model: whose modules ``fully_shard`` may have been applied to.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @property
    def can_be_put_back(self) -> bool:
        """Return whether torch has what it takes: it has since 2.13."""
        states = self._states()
        return bool(states) and all(hasattr(each, "_reset_iter_state") for each in states)

    def put_back(self) -> None:
        """Drop all that a pass has begun: gathered parameters, buffers, whole gradients."""
        states = self._states()
        for state in states:
            _drop_what_is_under_way(state)
        for state in states:
            if state._is_root:
                if _is_half_initialized(state):
                    _forget_initialization(state)
                else:
                    state._reset_iter_state()
            for group in state._fsdp_param_groups:
                _shard(group)

    def settle(self) -> None:
        """Have the model hold its shards, which are what is clipped, updated and gathered anew.

        A pass without gradients leaves the root gathered, and ``set_reshard_after_backward(False)``
        leaves everything so, as it was before the update.
        """
        for state in self._states():
            for group in state._fsdp_param_groups:
                if not group.is_sharded:
                    _shard(group)

    def _states(self) -> Sequence[Any]:
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(fsdp, "FSDPModule", None)
        if kind is None:
            return ()
        modules = [module for module in self._model.modules() if isinstance(module, kind)]
        return [*{id(state): state for state in (m._get_fsdp_state() for m in modules)}.values()]


def _drop_what_is_under_way(state: Any) -> None:
    """Forget collectives without waiting for them: they may wait for a rank that never comes."""
    shared = state._comm_ctx
    if _has_begun(state):
        shared.all_gather_state = None
        shared.reduce_scatter_states.clear()
        shared._last_post_reduce_events.clear()
    for group in state._fsdp_param_groups:
        group._all_gather_result = None
        group._post_reduce_event = None
        group._all_reduce_state = None
        group._reshard_after_forward_event = None


def _has_begun(state: Any) -> bool:
    """Return whether there was a first pass, which sets up what groups share."""
    return hasattr(state._comm_ctx, "reduce_scatter_states")


def _shard(group: Any) -> None:
    """Register the shards of one group, and free what was gathered, however far that had come."""
    for parameter in group.fsdp_params:
        if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
            whole.grad = None
        parameter.unsharded_accumulated_grad = None
        parameter.grad_offload_event = None
        parameter._sharded_post_forward_param = None
        parameter._sharded_post_forward_param_data = None
        parameter.to_sharded()
    group._sharded_state = type(group._sharded_state).SHARDED


def _is_half_initialized(root: Any) -> bool:
    """Return whether the first pass was cut before all groups were ready."""
    groups = [group for each in root._state_ctx.all_states for group in each._fsdp_param_groups]
    is_ready = all(group._reset_sharded_params for group in groups)
    return not (_has_begun(root) and is_ready)


def _forget_initialization(root: Any) -> None:
    for state in (*root._state_ctx.all_states, root):
        state._is_root = None
    root._state_ctx.all_states.clear()
    root._state_ctx.iter_forward_root = None
