"""Rebuilds rows of fms-acceleration: transformers' Trainer, on one card or under FSDP1.

Source: the project's benchmark.py, scenarios.yaml, accelerate.yaml and fast kernels; transformers
4.45 and 4.48 (losses of Granite and GPTBigCode, the cache of the latter), trl's and the project's
way to prepare 4-bit models, accelerate 0.34 and 1.0 (``FullyShardedDataParallelPlugin``), peft 0.12
and 0.13.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.utils._pytree import tree_map_only

from accuracy.loading import load_one_by_one
from accuracy.packages import CannotRebuild, load_package
from accuracy.quantized import place_scales, replace_linears

from .reading import is_four_bit, number_after, shape
from .steps import PublishedStep

_NF4 = {"type": "nf4", "double_quant": True, "compute_dtype": "bfloat16"}


def rebuilt(fields: Mapping[str, Any]) -> PublishedStep:
    """Rebuild a row of fms-acceleration."""
    return PublishedStep(setup=partial(_set_up, fields))


def _set_up(fields: Mapping[str, Any]) -> Callable[[], None]:
    model = _adapted(_built(fields), fields)
    model.train()
    wrapped: Any = model if fields["ranks"] == 1 else _sharded(model, fields)
    trained = [each for each in wrapped.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, weight_decay=0.01, eps=1e-4, foreach=True)
    ids = torch.randint(0, fields["model"]["vocab"], (fields["micro_batch"], fields["sequence"]))
    precision = partial(_precision, fields)

    def step() -> None:
        batch = ids.cuda()
        with precision():
            loss, output = wrapped(input_ids=batch)
        if _is_mixed(fields):  # as accelerate's ``ConvertOutputsToFp32`` does
            output = tree_map_only(torch.Tensor, torch.Tensor.float, output)
        del batch, output
        loss.backward()
        if isinstance(wrapped, FullyShardedDataParallel):
            wrapped.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        wrapped.zero_grad()

    return step


def _is_mixed(fields: Mapping[str, Any]) -> bool:
    return "bf16=True" in fields["dtype"]


def _precision(fields: Mapping[str, Any]) -> AbstractContextManager[Any]:
    if not _is_mixed(fields):
        return nullcontext()
    # A virtual card is not there for torch, which would switch autocast off.
    with (
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda *_args, **_kwargs: True),
    ):
        return torch.autocast("cuda", dtype=torch.bfloat16)


def _built(fields: Mapping[str, Any]) -> Any:
    """Build the frozen or trained model on the card; its forward gives loss and logits."""
    transformers = load_package("transformers")
    layers, width, heads, kv_heads, ffn, vocabulary = shape(
        fields, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"
    )
    if "bigcode" in fields["model"]["name"]:
        config = transformers.GPTBigCodeConfig(
            n_layer=layers, n_embd=width, n_head=heads, n_inner=ffn, multi_query=kv_heads == 1,
            vocab_size=vocabulary, n_positions=fields["model"]["positions"], use_cache=False,
        )  # fmt: skip
        kind, upcasts = transformers.GPTBigCodeForCausalLM, False
    elif "PowerLM" in fields["model"]["name"]:
        config = transformers.GraniteConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
            num_key_value_heads=kv_heads, intermediate_size=ffn, vocab_size=vocabulary,
            tie_word_embeddings=fields["model"]["tied"], use_cache=False,
        )  # fmt: skip
        kind, upcasts = transformers.GraniteForCausalLM, True
    else:
        raise CannotRebuild(f"the class of {fields['model']['name']} is not known here")
    # Under FSDP a process loads on the host, and its units are moved one by one.
    place = "cpu" if fields["ranks"] > 1 else "cuda"
    with torch.device("meta" if is_four_bit(fields) else place):
        model = kind._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if is_four_bit(fields):
        storage = "bfloat16" if fields["ranks"] > 1 else None
        replace_linears(model, {**_NF4, "storage": storage})
        model.is_loaded_in_4bit = True
        load_one_by_one(model, torch.bfloat16, place)
        place_scales(model, "cuda")
    model.gradient_checkpointing_enable()
    is_fast = "foak" in str(fields.get("framework_config"))
    loss_of = _InPlaceCrossEntropy.apply if is_fast else F.cross_entropy
    forward = partial(loss_and_logits, upcasts=upcasts, loss_of=loss_of)
    model.forward = types.MethodType(forward, model)
    return model


class _InPlaceCrossEntropy(torch.autograd.Function):
    """The project's fast kernel, in the bytes that it takes: gradients are written over logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sums = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        ctx.save_for_backward(logits, sums, labels)
        return torch.empty_like(sums).sum()

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


def loss_and_logits(
    model: Any,
    input_ids: torch.Tensor,
    *,
    upcasts: bool,
    loss_of: Callable[..., Any] = F.cross_entropy,
    **_others: Any,
) -> Any:
    """Return the loss as transformers 4.45 computed it, on a copy of the shifted logits.

    The output also has keys and values of each layer of GPTBigCode, which goes on filling its
    cache while it checkpoints. They are views of what the fused projection returns, queries too.
    """
    cache: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _inputs, fused: cache.append(fused.detach()))
        for name, module in model.named_modules()
        if name.endswith("attn.c_attn")
    ]
    hidden = model.base_model(input_ids=input_ids).last_hidden_state
    for hook in hooks:
        hook.remove()
    logits = model.lm_head(hidden)
    scaling = getattr(model.config, "logits_scaling", None)
    if scaling is not None:
        logits = logits / scaling
    if upcasts:
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    labels = input_ids[..., 1:].contiguous()
    return loss_of(shifted.view(-1, shifted.size(-1)), labels.view(-1)), (logits, cache)


def _adapted(model: Any, fields: Mapping[str, Any]) -> Any:
    """Freeze the model and lay adapters beside its layers, where the row has some."""
    task = fields["task"]
    if "LoRA" not in task:
        return model
    peft = load_package("peft")
    if _is_prepared(fields):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
    names = task.partition("targets ")[2].split()
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    config = peft.LoraConfig(
        r=int(number_after("r", task)),
        lora_alpha=int(number_after("alpha", task)),
        lora_dropout=number_after("dropout", task),
        target_modules=[name for name in names if name in present],
        task_type=None,
    )
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, config)
    for name, module in model.named_modules():
        module.is_adapter = "lora_" in name
    if _is_prepared(fields):
        _cast_back(model)
    return model


def _is_prepared(fields: Mapping[str, Any]) -> bool:
    """Tell whether trl prepares the 4-bit model; the project's plugin and FSDP do without."""
    is_plain = "baseline" in str(fields.get("framework_config"))
    return is_four_bit(fields) and is_plain and fields["ranks"] == 1


def _cast_back(model: nn.Module) -> None:
    """Cast embeddings and head back, as trl's ``peft_module_casting_to_bf16`` does."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_ends = any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe"))
        if is_ends and weight is not None and weight.dtype is torch.float32:
            module.to(torch.bfloat16)


def _sharded(model: Any, fields: Mapping[str, Any]) -> nn.Module:
    """Shard as accelerate does: every decoder layer, and every layer of an adapter by itself."""
    if "FULL_SHARD" not in fields["parallelism"]:
        raise CannotRebuild(f"it says {fields['parallelism']!r} of how it is sharded")
    mixed = None
    if _is_mixed(fields):
        bf16 = torch.bfloat16
        mixed = MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=unit_policy,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=mixed,
        use_orig_params=False,
        device_id=torch.device("cuda", 0),
    )


def unit_policy(module: nn.Module, recurse: bool, **_sizes: Any) -> bool:
    """Choose what becomes a unit, as ``peft.utils.other.fsdp_auto_wrap_policy`` does."""
    if recurse:
        return True
    if re.search(r"(Block|DecoderLayer)$", type(module).__name__):
        return True
    return type(module) is nn.Linear and bool(getattr(module, "is_adapter", False))
