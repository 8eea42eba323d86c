"""Rebuilds rows of torchtitan: its decoder, its sharding, its selective checkpointing, its loop.

Source: train.py and parallelisms of torchtitan at the commits that the rows name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from accuracy.packages import CannotRebuild

from .circumstances import pull_request
from .decoder import Decoder, Shape
from .reading import shape
from .steps import PublishedStep, refuse_compiled

_NATIVE_NORM_SINCE = 985
"""The pull request that has ``nn.RMSNorm`` instead of a module of the project's own."""
_LOGITS_FREED_SINCE = 800
"""Pull requests with a number above have ``del pred`` before backward."""
_LATEST = 10_000
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.max.default,
}


def rebuilt(fields: Mapping[str, Any]) -> PublishedStep:
    """Rebuild a row of torchtitan, or one measured with it.

    Raises:
        CannotRebuild: if it was compiled, or in float8.
    """
    refuse_compiled(fields)
    if "loat8" in str(fields.get("notes")):
        msg = "its layers are torchao's dynamic float8 ones, whose saved copies are not rebuilt"
        raise CannotRebuild(msg)
    is_first = re.search(r"step ?1\b", str(fields.get("steps"))) is not None
    return PublishedStep(
        setup=partial(set_up, fields),
        num_steps=1 if is_first else 3,
        measured_from_step=0 if is_first else 1,
    )


def set_up(fields: Mapping[str, Any]) -> Callable[[], None]:
    """Build the model, shard it, and return the step of the loop."""
    number = pull_request(fields) or _LATEST
    layers, width, heads, kv_heads, ffn, vocabulary = shape(
        fields, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"
    )
    is_early = number < _LOGITS_FREED_SINCE
    notes = str(fields.get("notes"))
    with torch.device("cpu" if "FSDP1" in fields["parallelism"] else "meta"):
        model: nn.Module = Decoder(
            Shape(
                num_layers=layers,
                width=width,
                num_heads=heads,
                num_kv_heads=kv_heads,
                hidden_width=ffn,
                vocabulary=vocabulary,
                length=fields["sequence"],
                is_own_norm=(number < _NATIVE_NORM_SINCE and "nn.RMSNorm" not in notes)
                or "own RMSNorm" in notes,
                upcasts_logits=is_early,
            )
        )
    _checkpoint(model, fields["checkpointing"])
    shard = _shard_in_units if "FSDP1" in fields["parallelism"] else _shard
    model = shard(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=3e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=("fused=True" in fields["optimizer"]) or None,
        foreach=None if "fused=True" in fields["optimizer"] else True,
    )
    tokens = torch.randint(0, vocabulary, (fields["micro_batch"], fields["sequence"]))
    return (_early_step if is_early else _step)(model, optimizer, tokens)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> Callable[[], None]:
    """Write the loop's step of 2025: logits are dropped before backward."""

    def step() -> None:
        inputs, labels = tokens.cuda(), tokens.cuda()
        optimizer.zero_grad()
        pred = model(inputs)
        loss = F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))
        del pred
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


def _early_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> Callable[[], None]:
    """Write the loop's step of early 2024: logits keep their name until the next ones."""
    bound: dict[str, torch.Tensor] = {}

    def step() -> None:
        bound["inputs"], bound["labels"] = tokens.cuda(), tokens.cuda()
        optimizer.zero_grad()
        bound["pred"] = model(bound["inputs"])
        bound["loss"] = F.cross_entropy(bound["pred"].flatten(0, 1), bound["labels"].flatten(0, 1))
        bound["loss"].backward()
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _shard(model: nn.Module) -> nn.Module:
    """Shard as ``apply_fsdp`` does: every block, the last of which stays gathered, and the rest."""
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = list(model.layers.values())  # type: ignore[union-attr,operator]
    for number, block in enumerate(blocks):
        fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=number < len(blocks) - 1
        )
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    return model


def _shard_in_units(model: nn.Module) -> nn.Module:
    """Shard by FSDP1: every block a unit, and the rest."""
    kwargs: dict[str, Any] = {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "use_orig_params": True,
        "device_id": torch.device("cuda", 0),
    }
    for name, block in list(model.layers.items()):  # type: ignore[union-attr,operator]
        model.layers[name] = FullyShardedDataParallel(block, **kwargs)  # type: ignore[union-attr,operator,index]
    return FullyShardedDataParallel(model, **kwargs)


def _checkpoint(model: nn.Module, how: Any) -> None:
    """Wrap blocks as the row says: all, every second one, or all with some operators saved."""
    text = str(how)
    every = re.search(r"option '(\d+)'", text)
    for number, (name, block) in enumerate(list(model.layers.items())):  # type: ignore[union-attr,operator]
        if every and (number + 1) % int(every[1]):
            continue
        kwargs: dict[str, Any] = {"preserve_rng_state": False}
        if "op policy" in text or "per op" in text:
            kwargs["context_fn"] = _saving_some
        model.layers[name] = checkpoint_wrapper(block, **kwargs)  # type: ignore[union-attr,operator,index]


def _saving_some() -> Any:
    """Save what ``_save_list`` has, of the products of matrices every second one."""
    counts: dict[str, int] = defaultdict(int)

    def policy(ctx: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        mode = "recompute" if ctx.is_recompute else "forward"
        if func == torch.ops.aten.mm.default:
            counts[mode] += 1
            if counts[mode] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        if func in _SAVED:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
