"""What in a configuration of DeepSpeed speaks against a step that is exact, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_AUTO = "auto"
_MOST_SHOWN = 60
_TOO_MANY = 10**18
_ROUNDS = "rounds what ranks exchange, so that results change"
_RENAMED = "is an older name; say offload_optimizer or offload_param"
_REFUSED_OF_ZERO = {
    "cpu_offload": _RENAMED,
    "cpu_offload_param": _RENAMED,
    "zero_quantized_weights": _ROUNDS,
    "zero_quantized_gradients": _ROUNDS,
    "zero_quantized_nontrainable_weights": _ROUNDS,
    "zenflow": "updates a part of the parameters later than the rest",
    "legacy_stage1": "is of older releases",
    "elastic_checkpoint": "is of older releases",
}
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SECTIONS = ("fp16", "bf16", "data_types", "compile")
_SIZES = (
    *("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "stage3_max_live_parameters"),
)
_OTHER_STEPS = {
    "data_efficiency": "it changes what a batch holds",
    "curriculum_learning": "it changes what a batch holds",
    "progressive_layer_drop": "it leaves layers out",
    "compression_training": "it changes the weights",
    "weight_quantization": "it changes the weights",
    "autotuning": "it runs other sizes of batches than were asked for",
    "pipeline_parallelism": "stages hold parts of the model, and a step is the pipeline's own",
    "tensor_parallel": "ranks would share one batch, and count its samples several times",
    "sequence_parallel_size": "ranks would share one batch, and count its samples several times",
    "expert_parallel": "experts have groups of ranks of their own",
    "hybrid_engine": "it has an engine of its own",
    "optimizer": (
        "the optimizer is the job's own, of torch, so this one would be left out without a word"
    ),
}


def contradictions(
    config: Mapping[str, Any],
    *,
    batch_size: int,
    num_ranks: int,
    clip_grad_norm: float | None,
) -> list[str]:
    """Say what of a configuration contradicts the job, itself, or exact steps; a sentence each."""
    if found := malformed(config):
        return found
    section = config.get("zero_optimization", {})
    return [
        *_of_batches(config, batch_size, num_ranks),
        *_of_numerics(config, clip_grad_norm),
        *_of_zero(section),
        *_of_engines(config),
    ]


def malformed(config: Mapping[str, Any]) -> list[str]:
    """Say what of a configuration is of another kind than DeepSpeed takes; a sentence each."""
    section = config.get("zero_optimization", {})
    if not isinstance(section, Mapping):
        return [f"zero_optimization is {_shown(section)}, an older form. Give an object."]
    places = ("offload_optimizer", "offload_param")
    objects = {
        **{key: config.get(key, {}) for key in _SECTIONS},
        **{key: section.get(key) or {} for key in places},
    }
    return [
        *(
            f"{key} is {_shown(value)}; needed is an object."
            for key, value in objects.items()
            if not isinstance(value, Mapping)
        ),
        *_not(config, _COUNTS, "a whole number above 0", lambda value: _is_count(value, 1)),
        *_not(config, ("gradient_clipping",), "a number of at least 0", _is_norm),
        *_not(section, ("stage",), "0, 1, 2 or 3", lambda value: _is_count(value, 0) and value < 4),
        *_not(section, _SIZES, "a number of at least 0", _is_norm),
    ]


def _not(
    section: Mapping[str, Any], keys: Iterable[str], needed: str, is_right: Callable[[Any], bool]
) -> Iterator[str]:
    for key in keys:
        value = section.get(key, _AUTO)
        if value != _AUTO and not is_right(value):
            yield f"{key} is {_shown(value)}; needed is {needed}."


def _shown(value: object) -> str:
    return repr(value)[:_MOST_SHOWN]


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and bool(least <= value < _TOO_MANY)


def _is_norm(value: Any) -> bool:
    return value is None or (type(value) in {int, float} and bool(0 <= value < _TOO_MANY))


def _of_batches(config: Mapping[str, Any], batch_size: int, num_ranks: int) -> Iterator[str]:
    def given(key: str) -> int | None:
        value = config.get(key, _AUTO)
        return None if value == _AUTO else int(value)

    total = given("train_batch_size")
    micro = given("train_micro_batch_size_per_gpu")
    passes = given("gradient_accumulation_steps")
    if total is not None and total != batch_size * num_ranks:
        yield (
            f"train_batch_size is {total}, and the job's is {batch_size} on each of {num_ranks} "
            f"rank(s), {batch_size * num_ranks}."
        )
    if micro is not None and passes is not None and micro * passes != batch_size:
        yield (
            f"train_micro_batch_size_per_gpu {micro} times gradient_accumulation_steps {passes} is "
            f"{micro * passes}, and a rank has a batch of {batch_size}."
        )
    elif passes is not None and batch_size % passes:
        yield f"gradient_accumulation_steps is {passes}, which does not divide {batch_size}."


def _of_numerics(config: Mapping[str, Any], clip_grad_norm: float | None) -> Iterator[str]:
    clipped = config.get("gradient_clipping", _AUTO)
    if clipped != _AUTO and float(clipped or 0) != (clip_grad_norm or 0.0):
        yield f"gradient_clipping is {clipped}, and the job clips to {clip_grad_norm}."
    enabled = [name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled") is True]
    if len(enabled) > 1:
        yield "fp16 and bf16 are both enabled."
    exchanged = config.get("communication_data_type")
    if exchanged not in (None, _AUTO, "fp32", *enabled):
        yield (
            f"communication_data_type is {exchanged}, coarser than what is computed with: "
            "gradients would be rounded on their way."
        )
    if config.get("gradient_allreduce_op", "avg") == "sum":
        yield "gradient_allreduce_op is sum, and gradients are weighed for an average."
    accumulated = config.get("data_types", {}).get("grad_accum_dtype")
    if "bf16" in enabled and accumulated == "fp32" and _stage(config) == 1:
        yield (
            "data_types.grad_accum_dtype is fp32 with bf16 in stage 1, for which DeepSpeed takes "
            "an optimizer that memfit was not shown to weigh pieces in. Take stage 2."
        )


def _of_zero(section: Mapping[str, Any]) -> Iterator[str]:
    stage = section.get("stage", 0)
    if section.get("overlap_comm") is True and stage < 2:
        yield (
            f"overlap_comm is true in stage {stage}, which DeepSpeed does not have with "
            "managed_gradient_accumulation false, on which steps of any length rest."
        )
    for key, reason in _REFUSED_OF_ZERO.items():
        if section.get(key):
            yield f"{key} {reason}."
    if section.get("ignore_unused_parameters") is False and stage == 2:
        yield "ignore_unused_parameters is false, which ends steps whose pieces use unlike parts."


def _of_engines(config: Mapping[str, Any]) -> Iterator[str]:
    for key, reason in _OTHER_STEPS.items():
        value = config.get(key)
        is_off = isinstance(value, Mapping) and value.get("enabled") is False
        if value and value not in (1, _AUTO) and not is_off:
            yield f"{key} is set, and {reason}."
    if config.get("compile", {}).get("deepcompile"):
        yield "compile.deepcompile does not go with managed_gradient_accumulation false."


def _stage(config: Mapping[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))
