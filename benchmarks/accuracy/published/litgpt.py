"""Rebuilds rows of litgpt: its decoder, its LoRA layers, its chunked head and loss, its loop.

Source: finetune/lora.py and finetune/full.py of lit-gpt in October 2023 and of litgpt in 2024,
pretrain of extensions/thunder, lit_gpt/utils.py (``chunked_cross_entropy``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._pytree import tree_map_only

from accuracy.packages import CannotRebuild

from .litgpt_model import GPT, Adapters, Block, Configuration
from .packed_linear import PackedLinear
from .reading import is_four_bit, number_after, shape
from .steps import PublishedStep, refuse_compiled

_CHUNK = 128
_SHORT = 64
_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "phi-1.5": {"is_llama": False, "rotary_fraction": 0.5, "has_parallel_residual": True},
    "phi-2": {"is_llama": False, "rotary_fraction": 0.4, "has_parallel_residual": True},
    "phi-3": {"is_llama": True},
    "tinyllama": {"is_llama": True},
    "tiny-llama": {"is_llama": True},
}
"""What lit_gpt/config.py says of the models besides their sizes."""
_PLACES = ("query", "key", "value", "projection", "mlp", "head")


def rebuilt(fields: Mapping[str, Any]) -> PublishedStep:
    """Rebuild a row of litgpt."""
    refuse_compiled(fields)
    return PublishedStep(
        setup=partial(_set_up, fields), num_steps=1, readings=tuple(_readings(fields))
    )


def _readings(fields: Mapping[str, Any]) -> Iterator[PublishedStep]:
    """Yield what a row leaves open: what came before, and which update the reading contains."""
    if "longest sample of the data set" in fields["steps"]:
        return  # there is one such micro-batch, and all others are shorter
    in_a_row = partial(_set_up, fields, num_micro_batches=2)
    if "LoRA" in fields["task"]:
        yield PublishedStep(setup=in_a_row, num_steps=1)
        return
    yield PublishedStep(setup=partial(_set_up, fields, updates=False), num_steps=1)
    yield PublishedStep(setup=partial(_set_up, fields), num_steps=2)
    yield PublishedStep(setup=in_a_row, num_steps=2)


def _set_up(
    fields: Mapping[str, Any], *, updates: bool = True, num_micro_batches: int = 1
) -> Callable[[], None]:
    config = _configuration(fields)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: nn.Module = GPT(config)
    finally:
        torch.set_default_dtype(torch.float32)
    if config.adapters.rank:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    if fields["ranks"] > 1:
        model = _sharded(model, fields)
    trained = [each for each in model.parameters() if each.requires_grad]
    is_fused = "fused=True" in fields["optimizer"]
    optimizer = torch.optim.AdamW(
        trained, lr=3e-4, weight_decay=0.01, fused=is_fused, foreach=not is_fused
    )
    tokens = torch.randint(0, config.vocabulary, (fields["micro_batch"], fields["sequence"]))
    return _step(fields, model, optimizer if updates else None, [tokens.cuda()] * num_micro_batches)


def _configuration(fields: Mapping[str, Any]) -> Configuration:
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    layers, width, heads, groups, hidden_width, vocabulary = shape(fields, *names)
    name = str(fields["model"]["name"]).lower()
    known = next((each for key, each in _ARCHITECTURES.items() if name.startswith(key)), None)
    if known is None:
        raise CannotRebuild(f"the architecture of {name} is not known here")
    kwargs: dict[str, Any] = dict(known)
    if is_four_bit(fields):
        kwargs["make_linear"] = _packed(fields)
    return Configuration(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_groups=groups,
        hidden_width=hidden_width,
        vocabulary=vocabulary,
        length=fields["sequence"],
        has_head_bias=bool(known.get("has_parallel_residual")),
        adapters=_adapters(fields["task"]),
        **kwargs,
    )


def _adapters(task: str) -> Adapters:
    """Read where the adapters are: spelt out, or query and value as in 2023."""
    if "LoRA" not in task:
        return Adapters()
    named = {place: f"'{place}': 'true'" in task for place in _PLACES}
    places = named if any(named.values()) else {"query": True, "value": True}
    return Adapters(
        rank=int(number_after("r", task)),
        alpha=number_after("alpha", task),
        dropout_fraction=number_after("dropout", task),
        **places,
    )


def _packed(fields: Mapping[str, Any]) -> Callable[[int, int, bool], nn.Module]:
    """Return what makes 4-bit layers as the row's version of bitsandbytes has them.

    litgpt has them compute in the dtype of its precision, and asks for bitsandbytes 0.42.
    """
    is_nested = "double quant" in fields["task"] and "no double" not in fields["task"]
    version = (fields.get("library_versions") or {}).get("bitsandbytes", "0.42")
    keeps_input = tuple(int(each) for each in re.findall(r"\d+", version)[:2]) < (0, 43)

    def make(n_in: int, n_out: int, bias: bool) -> nn.Module:
        return PackedLinear(n_in, n_out, bias, is_nested=is_nested, keeps_input=keeps_input)

    return make


def _sharded(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module:
    """Shard as Fabric's FSDP strategy does, and checkpoint every block."""
    bf16 = torch.bfloat16
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
        use_orig_params=True,
        device_id=torch.device("cuda", 0),
    )
    if fields["checkpointing"]:
        apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Block))
    return model


def _step(
    fields: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    micro_batches: Sequence[torch.Tensor],
) -> Callable[[], None]:
    """Write micro-batches as Fabric runs them, and the update that comes after the last one.

    The wrapper that ``fabric.setup`` puts around a model returns everything in float32
    (``HalfPrecision.convert_output``), logits among it. Gradients of micro-batches before the last
    one are not reduced (``fabric.no_backward_sync``). Without an optimizer nothing is updated:
    where gradients are accumulated, a short run may end before that. Scripts of fine-tuning bind
    logits anew once the model has returned: until then the last ones live, and what their graph
    keeps without telling autograd, such as the inputs of 4-bit layers.
    """
    is_chunked = "chunks of 128" in fields["loss"]
    loss_chunk = 0 if "chunk_size=0" in fields["loss"] else _CHUNK
    is_accumulating = _num_accumulated(fields) > 1 and fields["ranks"] > 1

    binds_logits = "pre-training" not in fields["task"]
    bound: dict[str, Any] = {}

    def step() -> None:
        for tokens in micro_batches:
            with model.no_sync() if is_accumulating else nullcontext():
                micro_batch(tokens)
        if is_accumulating:
            micro_batch(micro_batches[0][:1, :_SHORT])  # the last ones are shorter
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    def micro_batch(tokens: torch.Tensor) -> None:
        logits = model(tokens, _CHUNK if is_chunked else 0)
        logits = tree_map_only(torch.Tensor, torch.Tensor.float, logits)
        if binds_logits:
            bound["logits"] = logits
        if is_chunked:
            logits[-1] = logits[-1][..., :-1, :]
            loss = _loss_of_chunks(logits, tokens[..., 1:])
        else:
            loss = _loss(logits[..., :-1, :], tokens[..., 1:], loss_chunk)
        (loss / 2).backward()

    return step


def _num_accumulated(fields: Mapping[str, Any]) -> int:
    """Return how many micro-batches give one update; 1 where that is not stated."""
    numbers = re.findall(r"\d+", str(fields.get("grad_accum")))
    return int(numbers[-1]) if numbers else 1


def _loss_of_chunks(logits: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    pieces = targets.split(logits[0].size(1), dim=1)
    losses = [
        F.cross_entropy(chunk.reshape(-1, chunk.size(-1)), piece.reshape(-1), reduction="none")
        for chunk, piece in zip(logits, pieces, strict=True)
    ]
    return torch.cat(losses).mean()


def _loss(logits: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
    logits, targets = logits.reshape(-1, logits.size(-1)), targets.reshape(-1)
    if not chunk:
        return F.cross_entropy(logits, targets)
    losses = [
        F.cross_entropy(each, target, reduction="none")
        for each, target in zip(logits.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(losses).mean()
