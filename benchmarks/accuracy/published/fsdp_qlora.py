"""Rebuilds rows of fsdp_qlora: a Llama of transformers with peft's adapters, sharded by FSDP1.

Source: train.py of the project at the commit that the rows name, and transformers and peft of
early 2024: logits are upcast, adapters have the model's dtype, and the model's output keeps its
name until the next one.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from accuracy.loading import load_one_by_one
from accuracy.packages import CannotRebuild, load_package
from accuracy.quantized import place_scales, replace_linears

from .reading import is_four_bit, number_after, shape
from .steps import PublishedStep
from .trainer import loss_and_logits, unit_policy

_NF4 = {"type": "nf4", "double_quant": True, "compute_dtype": "bfloat16", "storage": "bfloat16"}


def rebuilt(fields: Mapping[str, Any]) -> PublishedStep:
    """Rebuild a row of fsdp_qlora.

    Raises:
        CannotRebuild: if parameters are offloaded to the host.
    """
    if "CPU offload" in fields["parallelism"]:
        msg = "FSDP1 keeps its parameters on the host, which is not followed here"
        raise CannotRebuild(msg)
    return PublishedStep(setup=partial(_set_up, fields))


def _set_up(fields: Mapping[str, Any]) -> Callable[[], None]:
    model = _adapted(_built(fields), fields["task"])
    model.train()
    strategy = "NO_SHARD" if "NO_SHARD" in fields["parallelism"] else "FULL_SHARD"
    bf16 = torch.bfloat16
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=unit_policy,
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
        limit_all_gathers=True,
        use_orig_params=False,
        device_id=torch.device("cuda", 0),
    )
    trained = [each for each in wrapped.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.1, eps=1e-5, foreach=True)
    ids = torch.randint(0, fields["model"]["vocab"], (fields["micro_batch"], fields["sequence"]))
    bound: dict[str, Any] = {}

    def step() -> None:
        bound["batch"] = ids.cuda()
        bound["output"] = wrapped(input_ids=bound["batch"])
        bound["output"][0].backward()
        wrapped.clip_grad_norm_(0.3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _built(fields: Mapping[str, Any]) -> Any:
    """Build the frozen model: on the host, from where its units are moved one by one."""
    transformers = load_package("transformers")
    layers, width, heads, kv_heads, ffn, vocabulary = shape(
        fields, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"
    )
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=ffn, vocab_size=vocabulary,
        use_cache=False,
    )  # fmt: skip
    kind = transformers.LlamaForCausalLM
    with torch.device("meta" if is_four_bit(fields) else "cpu"):
        model = kind._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if is_four_bit(fields):
        replace_linears(model, dict(_NF4))
        load_one_by_one(model, torch.bfloat16, "cpu")
        place_scales(model, "cuda")
    is_reentrant = "reentrant True" in fields["checkpointing"] or "True)" in fields["checkpointing"]
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": is_reentrant}
    )
    model.forward = types.MethodType(partial(loss_and_logits, upcasts=True), model)
    return model


def _adapted(model: Any, task: str) -> nn.Module:
    """Lay adapters beside the layers whose first letters or names the row gives."""
    places = re.search(r" on ([\w,]+)_proj", task)
    if places is None:
        raise CannotRebuild(f"{task!r} does not say where its adapters are")
    peft = load_package("peft")
    config = peft.LoraConfig(
        r=int(number_after("r", task)),
        lora_alpha=int(number_after("alpha", task)),
        lora_dropout=number_after("dropout", task),
        target_modules=[f"{name}_proj" for name in places[1].split(",")],
    )
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, module in model.named_modules():
        module.is_adapter = "lora_" in name
    adapted: nn.Module = model
    return adapted
