"""Every remedy of the document as data: its claim, its flag, and what it does. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

_AS_DOCUMENTED = ("--as_documented", "--train_objective", "fp_morgan_4096", "--dformat", "A")
_COMMON = ("finetune", "--dataset_pth", "pesticides", *_AS_DOCUMENTED, "--lr", "1e-4", "--no-gpu")
SIZES = {
    "document": (*_COMMON, "--model", "document"),
    "cpu": (*_COMMON, "--n_layers", "7"),
}
"""The document's situation (batch 2, 100 peaks, fp32), and the same with a small model."""
NO_CHANGE = "a step is the same"
_NONE_SAID = "none given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One remedy of the document."""

    name: str
    flag: str
    claim: str
    effect: str
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The flag as words, at each size."""
    is_measurable: bool = True


def _one(
    name: str, flag: str, claim: str, effect: str, *, cpu: str | None = None, runs: bool = True
) -> Remedy:
    """Return a remedy whose flag is one text; ``cpu`` is the flag with a small model's figures."""
    small = tuple((flag if cpu is None else cpu).split())
    words = {"document": tuple(flag.split()), "cpu": small}
    return Remedy(name=name, flag=flag, claim=claim, effect=effect, words=words, is_measurable=runs)


REMEDIES: tuple[Remedy, ...] = (
    _one(
        "as the document begins",
        "--batch_size 2",
        "runs out of memory around epoch 60",
        "weights, gradients and Adam's states hold most of it; what grows until epoch 60 is a "
        "metric that is never reset, 64 KiB per validated spectrum and pass",
    ),
    _one(
        "gradient accumulation",
        "--batch_size 1 --accumulate_grad_batches 2",
        "~50 % of the peak",
        "the same effective batch; gradients are kept between the batches",
    ),
    _one("batch 2 to 1", "--batch_size 1", "part of the ~50 %", "halves activations alone"),
    _one("cache clearing", "--empty_cache_every 1", "10 to 20 % with the next two", NO_CHANGE),
    _one("garbage collection", "--gc_every 10", "as above", NO_CHANGE),
    _one("explicit deletion", "--delete_batches", "as above", NO_CHANGE),
    _one(
        "allocator settings",
        "--allocator_settings max_split_size_mb:128",
        "smaller chunks",
        "acts on what a GPU reserves, not on what a step needs",
    ),
    _one(
        "memory fraction",
        "--memory_fraction 0.95",
        "95 % of the memory",
        "a step runs out of memory earlier; needs no less",
    ),
    Remedy(
        name="lazy data",
        flag="no flag: the default",
        claim=_NONE_SAID,
        effect="HDF5 rows are read when asked for; `--in_mem` reads all; host memory only",
        words={"document": (), "cpu": ()},
    ),
    _one(
        "half of validation",
        "--limit_val_batches 0.5",
        _NONE_SAID,
        "a step is the same; a metric that is never reset grows half as fast",
    ),
    _one("100 validation batches", "--limit_val_batches 100", _NONE_SAID, "as above"),
    _one(
        "validation twice per epoch",
        "--val_check_interval 0.5",
        "only twice per epoch",
        "the step after a validation has no gradients of the step before; the others are the same",
    ),
    _one("one checkpoint kept", "--save_top_k 1", _NONE_SAID, "disk only"),
    _one("fewer checkpoints", "--every_n_train_steps 2000", _NONE_SAID, "disk only"),
    _one(
        "precision",
        "--train_precision bf16",
        "`16`; slight precision loss",
        "weights stay fp32: activations alone shrink, and casts are added; `16` needs a GPU",
    ),
    _one(
        "smaller d_fourier",
        "--d_fourier 724",
        _NONE_SAID,
        "a smaller model: another result",
        cpu="--d_fourier 32",
    ),
    _one(
        "smaller d_peak",
        "--d_peak 36",
        _NONE_SAID,
        "a smaller model: another result",
        cpu="--d_peak 12",
    ),
    _one("fewer layers", "--n_layers 5", _NONE_SAID, "a smaller model: another result"),
    _one(
        "frozen layers",
        "--frozen_layers 5",
        _NONE_SAID,
        "no gradients, states and activations for what is frozen: another result",
    ),
    _one(
        "layer by layer",
        "--layer_by_layer",
        "for extreme cases",
        "blocks are recomputed in backward; exact",
    ),
    _one(
        "fused attention",
        "--bias per_key --attention fused",
        "if available",
        "no logits on a GPU; fused kernels need the bias per key",
    ),
    _one("exact bias", "--bias per_key", "not in the document", "no tensor of differences; exact"),
    _one(
        "features in chunks",
        "--fourier_chunk 256",
        "not in the document",
        "features are made again in backward; exact",
    ),
    _one(
        "exact bias, chunks and layer by layer",
        "--bias per_key --attention fused --fourier_chunk 256 --layer_by_layer",
        "not in the document",
        "all that is exact together",
    ),
    _one("fewer peaks", "--max_peaks_n 80", _NONE_SAID, "less of each spectrum: another result"),
    _one(
        "one GPU instead of two",
        "--num_devices 1",
        _NONE_SAID,
        "per GPU it saves only DDP's buckets, which are as large as the gradients",
        runs=False,
    ),
    _one("one worker", "--num_workers_data 1", "host memory", "host memory only"),
    _one("no pinning", "--num_workers_data 0", "memory pressure", "host memory only, the default"),
    _one("memory log", "--log_memory_every 1", "monitoring", NO_CHANGE),
    _one("standard preset", "--preset standard", "~50 %", "the first remedies together"),
    _one("extreme preset", "--preset extreme", "more", "and fewer peaks, validation, checkpoints"),
    Remedy(
        name="logging to W&B",
        flag="--wandb_project NAME",
        claim="in a script's name",
        effect="an optional logger",
        words={"document": (), "cpu": ()},
        is_measurable=False,
    ),
)
