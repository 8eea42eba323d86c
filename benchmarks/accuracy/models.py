"""Models of rows, built with random weights: nothing is downloaded.

``from_pretrained`` reads values into the tensors that the constructor makes; on the CPU that leaves
the card alone, so the constructor stands in for it. Loading straight onto the card is in
``loading``, where the order of allocations is followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from recording.models import build as build_recorded
from torch import nn

from .attention import attention_implementation
from .blank import build_without_values, has_no_values
from .calls import Call, inner_calls, parse_call
from .configurations import configuration_of, find_published
from .loading import load_on_card
from .packages import CannotRebuild, load_package
from .quantized import replace_linears
from .rows import Row

_AUTO_CLASS = re.compile(r"\bAutoModel\w*")
_FULL_PRECISION = "float32"
_RECORDED_CALL = "recording.models.build"
_PEFT_CLEARS_CACHE = (0, 20)
"""The first peft known to empty the cache after upcasting (0.19.1 does not)."""


def build_model(row: Row, device: str = "cuda") -> nn.Module:
    """Build the model of a row on the device, ready to train, with the events of its loading.

    Raises:
        CannotRebuild: if the row does not say what is needed, or a package is missing.
    """
    if row.quantization is not None or row.constructor.get("moved_with") == "device_map":
        with torch.device("meta"):
            model = build_blank(row)
        _quantize(model, row)
        load_on_card(model, row, parameter_dtype(row), device)
    else:
        model = build_blank(row).to(device)
    return prepare_training(model, row)


def count_parameters(row: Row) -> tuple[int, int]:
    """Count all and the trainable parameters of a row's model, which is built without memory."""
    with torch.device("meta"):
        model = build_blank(row)
    if row.lora is not None:
        model = _with_adapters(model, row.lora)
    sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)


def build_blank(row: Row) -> nn.Module:
    """Build the architecture of a row on the default device, without adapters or 4-bit weights."""
    builders: Mapping[str, Callable[[Row], nn.Module]] = {
        "torchvision": _torchvision_model,
        "timm": _timm_model,
        "transformers": _transformers_model,
        "custom": _custom_model,
    }
    return builders[row.model_library](row)


def parameter_dtype(row: Row) -> torch.dtype:
    """Return the dtype that the weights have before adapters and upcasts."""
    detail = row.precision_detail
    defaults = {"fp16": "float16", "bf16": "bfloat16"}
    name = detail.get("load_dtype") or detail.get("parameters")
    name = str(name or defaults.get(row.precision, _FULL_PRECISION)).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CannotRebuild(f"{name!r} is no dtype of its parameters")
    return dtype


def prepare_training(model: Any, row: Row) -> nn.Module:
    """Freeze, upcast, adapt and checkpoint a model on its device, in the order of the protocols."""
    if row.constructor.get("use_cache") is False and hasattr(model, "config"):
        model.config.use_cache = False
    if row.quantization is not None:
        _prepare_quantized(model, row)
    if row.lora is not None:
        model = _with_adapters(model, row.lora)
    if row.gradient_checkpointing is not None:
        _checkpoint(model, row)
    model.train(row.constructor.get("train_mode", True))
    return model  # type: ignore[no-any-return]


def _torchvision_model(row: Row) -> nn.Module:
    package = load_package("torchvision")
    call = parse_call(row.constructor.get("call")) or Call(name=row.model)
    name = call.last_name
    builder = getattr(package.models, name, None)
    if builder is None and name == "get_model" and call.args:
        builder = getattr(package.models, str(call.args[0]), None)
        call = Call(name=name, kwargs=call.kwargs)
    if builder is None:
        raise CannotRebuild(f"torchvision.models has no {name!r}")
    kwargs = {key: each for key, each in call.kwargs.items() if not _names_weights(key)}
    if name in {"googlenet", "inception_v3"}:
        kwargs.setdefault("init_weights", False)  # drawing them takes long, and no memory
    return _built(row, partial(builder, *call.args, **kwargs))


def _names_weights(argument: str) -> bool:
    """Return whether an argument chooses stored weights, which take no other memory."""
    return argument in {"weights", "pretrained", "weights_backbone"}


def _timm_model(row: Row) -> nn.Module:
    package = load_package("timm")
    call = parse_call(row.constructor.get("call"))
    kwargs = dict(call.kwargs) if call else {}
    name = call.args[0] if call and call.args else kwargs.pop("model_name", row.model)
    name = str(name).rpartition("/")[2]
    kwargs.pop("pretrained", None)
    return _built(row, partial(package.create_model, name, pretrained=False, **kwargs))


def _custom_model(row: Row) -> nn.Module:
    call = parse_call(row.constructor.get("call"))
    if call is not None and call.name == _RECORDED_CALL:
        return _built(row, partial(build_recorded, *call.args, **call.kwargs))
    layers = row.constructor.get("layers")
    if not layers:
        raise CannotRebuild(f"the custom model {row.model} lists no layers")
    return _built(row, lambda: nn.Sequential(*(_layer(entry) for entry in layers)))


def _layer(entry: Any) -> nn.Module:
    """Build one layer, given as its name alone or as ``[name, arguments...]``."""
    name, *args = [entry] if isinstance(entry, str) else entry
    builder = getattr(nn, str(name).removeprefix("nn."), None)
    if builder is None:
        raise CannotRebuild(f"torch.nn has no layer {name!r}")
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return builder(*args, **kwargs)


def _built(row: Row, builder: Callable[[], nn.Module]) -> nn.Module:
    """Call a constructor, and give its weights their dtype while they are on the CPU."""
    try:
        model = build_without_values(builder) if has_no_values() else builder()
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CannotRebuild(f"the constructor of {row.model} failed ({error})") from error
    dtype = parameter_dtype(row)
    return model if dtype is torch.float32 else model.to(dtype)


def _transformers_model(row: Row) -> nn.Module:
    transformers = load_package("transformers")
    config = configuration_of(row, transformers)
    model_class = _model_class(row, config, transformers)
    kwargs: dict[str, Any] = {"dtype": parameter_dtype(row)}
    implementation = attention_implementation(row)
    if implementation is not None:
        kwargs["attn_implementation"] = implementation
    try:
        model = model_class._from_config(config, **kwargs)
    except (TypeError, ValueError, ImportError) as error:
        raise CannotRebuild(f"{model_class.__name__} cannot be built ({error})") from error
    _untie(model, row)
    return model  # type: ignore[no-any-return]


def _model_class(row: Row, config: Any, transformers: Any) -> Any:
    """Find the class that a row names, by itself or through an Auto class."""
    call = row.constructor.get("call") or ""
    named = [row.constructor.get("cls"), row.model_config.get("cls")]
    for each in inner_calls(parse_call(call)):
        named += each.name.split(".")
    for name in named:
        found = getattr(transformers, name, None) if name else None
        if isinstance(found, type) and hasattr(found, "_from_config"):
            return found
    auto = _AUTO_CLASS.search(call)
    mapping = (
        getattr(getattr(transformers, auto[0], None), "_model_mapping", None) if auto else None
    )
    if mapping is not None and type(config) in mapping:
        found = mapping[type(config)]
        return found[0] if isinstance(found, tuple | list) else found
    known = find_published(row.model)
    if known is None:
        raise CannotRebuild(f"the class of {row.model} is not known")
    return getattr(transformers, known.cls)


def _untie(model: Any, row: Row) -> None:
    """Give the output layer a weight of its own where the published model has one."""
    known = find_published(row.model)
    tied = row.model_config.get("tie_word_embeddings")
    if tied is None and known is not None:
        tied = known.values.get("tie_word_embeddings")
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if tied is not False or output is None:
        return
    if output.weight is model.get_input_embeddings().weight:
        output.weight = nn.Parameter(torch.empty_like(output.weight))


def _quantize(model: Any, row: Row) -> None:
    settings = row.quantization
    if settings is None:
        return
    if settings.get("type", "nf4") not in {"nf4", "fp4"}:
        raise CannotRebuild(f"{settings.get('type')} weights are not supported, only nf4 and fp4")
    if row.model_library != "transformers":
        raise CannotRebuild("4-bit weights are supported for transformers models only")
    replace_linears(model, dict(settings))
    model.is_loaded_in_4bit = True


def _prepare_quantized(model: Any, row: Row) -> None:
    """Freeze the model and upcast what is not quantized, as peft does it."""
    peft = load_package("peft")
    peft.prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=row.gradient_checkpointing is not None,
        auto_clear_cache=False,
    )
    version = row.library_versions.get("peft", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers >= _PEFT_CLEARS_CACHE:
        torch.cuda.empty_cache()


def _with_adapters(model: Any, settings: Mapping[str, Any]) -> Any:
    peft = load_package("peft")
    rank = settings.get("r") or settings.get("rank")
    if not rank:
        raise CannotRebuild("lora has no rank r")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=settings.get("alpha") or settings.get("lora_alpha") or 2 * rank,
        lora_dropout=settings.get("dropout") or settings.get("lora_dropout") or 0.0,
        bias=settings.get("bias", "none"),
        target_modules=settings.get("targets") or settings.get("target_modules"),
        task_type=settings.get("task_type"),
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise CannotRebuild(f"peft refuses the adapters ({error})") from error


def _checkpoint(model: Any, row: Row) -> None:
    """Switch gradient checkpointing on, with gradients through the frozen embedding of LoRA."""
    settings = row.gradient_checkpointing or {}
    if hasattr(model, "gradient_checkpointing_enable"):
        reentrant = settings.get("use_reentrant")
        kwargs = {} if reentrant is None else {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        raise CannotRebuild(f"{row.model} has no gradient checkpointing of its own")
    if row.lora is not None and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
