"""Which training steps are recorded: a fixed list, one row each, to be read as a table."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .workloads import BATCH, REAL, WORKLOADS, Workload

OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 1e-4}),
    "adamw-fused": ("AdamW", {"lr": 1e-4, "fused": True}),
    "adamw-loop": ("AdamW", {"lr": 1e-4, "foreach": False}),
    "adam": ("Adam", {"lr": 1e-4}),
    "amsgrad": ("Adam", {"lr": 1e-4, "amsgrad": True}),
    "sgd": ("SGD", {"lr": 1e-2}),
    "momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    "momentum-fused": ("SGD", {"lr": 1e-2, "momentum": 0.9, "fused": True}),
    "rmsprop": ("RMSprop", {"lr": 1e-4}),
    "adagrad": ("Adagrad", {"lr": 1e-3}),
    "adafactor": ("Adafactor", {"lr": 1e-3}),
}
ALLOCATORS: Mapping[str, str | None] = {
    "default": None,
    "expandable": "expandable_segments:True",
    "split": "max_split_size_mb:128",
    "roundup": "roundup_power2_divisions:8",
}
"""By name, the value of ``PYTORCH_ALLOC_CONF``."""
PRECISIONS = ("fp32", "amp", "bf16")

# workload batch precision optimizer recomputes accumulation allocator
_TABLE = """
mlp             4096  fp32  adamw           -     1  default
mlp             4096  amp   adamw-fused     -     1  default
mlp             4096  bf16  sgd             ckpt  1  default
mlp             2048  fp32  adafactor       -     4  default
cnn              256  fp32  sgd             -     1  default
cnn              512  amp   momentum        -     1  default
cnn              256  bf16  adamw           -     4  roundup
resnet            64  fp32  momentum        -     1  default
resnet           128  amp   momentum-fused  -     1  default
resnet            64  amp   adamw           ckpt  1  default
resnet            32  fp32  adamw           -     4  expandable
resnet            96  fp32  rmsprop         -     1  split
mobilenet         64  fp32  rmsprop         -     1  default
mobilenet        128  amp   adamw           -     1  expandable
mobilenet         64  bf16  adamw-fused     -     1  default
convnext          32  fp32  adamw           -     1  default
convnext          64  amp   adamw           ckpt  1  default
convnext          32  bf16  adamw-fused     -     4  default
unet              16  fp32  adam            -     1  default
unet              32  amp   adamw           -     1  default
unet              32  amp   adamw           ckpt  1  roundup
unet              16  fp32  adamw-fused     -     1  expandable
video             16  fp32  momentum        -     1  default
video             32  amp   adamw           -     1  split
audio             32  fp32  adamw           -     1  default
audio             64  amp   adamw           ckpt  1  split
mixer             64  fp32  adamw           -     1  default
mixer            128  bf16  sgd             ckpt  4  default
vae              512  fp32  adam            -     1  default
vae              512  amp   adamw-fused     -     4  default
gan              128  fp32  adam            -     1  default
gan              256  amp   adam            -     1  default
lstm              32  fp32  adamw           -     1  default
lstm              64  amp   adamw           -     1  roundup
lstm              32  bf16  adagrad         -     1  default
gru               64  fp32  sgd             -     1  default
gru               32  amp   adamw-fused     -     4  default
bigru             64  fp32  adamw           -     1  default
bigru             64  amp   adam            -     1  expandable
encoder           32  fp32  adamw           -     1  default
encoder           64  amp   adamw           -     1  default
encoder           64  bf16  adamw-fused     -     1  default
encoder           32  fp32  adamw-loop      -     4  split
attention         32  fp32  adamw           -     1  default
attention         64  amp   adamw           ckpt  1  default
attention         32  bf16  momentum        -     1  default
decoder            8  fp32  adamw           -     1  default
decoder           16  amp   adamw           -     1  default
decoder           16  bf16  adamw-fused     -     1  default
decoder           16  amp   adamw           ckpt  1  default
decoder            8  amp   adamw-loop      -     4  default
decoder           16  amp   adamw           -     1  expandable
decoder-long       1  fp32  sgd             ckpt  1  default
decoder-long       2  bf16  adamw           -     1  default
decoder-gqa        4  fp32  adamw           -     1  default
decoder-gqa        8  amp   adamw-fused     ckpt  4  expandable
decoder-gqa        8  bf16  adafactor       -     1  default
translator        64  fp32  adamw           -     1  default
translator        64  amp   adamw           -     4  default
translator        64  bf16  amsgrad         -     1  default
recommender     8192  fp32  adamw           -     1  default
recommender    16384  fp32  sgd             -     1  default
recommender     8192  amp   adagrad         -     4  default
towers          4096  fp32  adamw           -     1  default
towers          8192  amp   adamw-fused     -     1  roundup
graph         400000  fp32  adamw           -     1  default
graph         800000  amp   adam            -     1  default
tagger          1024  fp32  adagrad         -     1  default
gpt2               8  fp32  adamw           -     1  default
gpt2              16  amp   adamw           -     1  default
gpt2              16  bf16  adamw-fused     -     1  default
gpt2              16  amp   adamw           ckpt  1  default
gpt2               8  amp   adamw           -     4  expandable
bert              16  fp32  adamw           -     1  default
bert              32  amp   adamw           -     1  split
bert              32  bf16  sgd             ckpt  1  default
distilbert        32  fp32  adamw-fused     -     1  default
distilbert        32  amp   adamw           -     4  default
roberta           32  amp   adafactor       -     1  default
t5-small          32  fp32  adafactor       -     1  default
t5-small          32  bf16  adamw           -     1  default
llama-1b           2  bf16  adamw           -     1  default
llama-1b           4  bf16  adamw-fused     ckpt  1  default
llama-1b           2  amp   sgd             ckpt  4  expandable
qwen2              4  amp   adamw           -     1  default
qwen2              8  bf16  adamw           ckpt  1  default
vit               32  fp32  adamw           -     1  default
vit               64  amp   adamw-fused     -     1  default
vit               64  bf16  momentum        ckpt  1  default
whisper-tiny       8  fp32  adamw           -     1  default
whisper-tiny      16  amp   adamw           -     4  default
resnet50          64  fp32  sgd             -     1  default
resnet50         128  amp   momentum        -     1  expandable
vgg16             32  fp32  momentum        -     1  default
vgg16             64  amp   adamw           -     1  default
efficientnet_b0   64  fp32  rmsprop         -     1  default
efficientnet_b0  128  amp   adamw           -     1  roundup
swin_t            32  fp32  adamw           -     1  default
swin_t            64  amp   adamw-fused     -     4  default
vit_small         64  amp   adamw           -     1  default
vit_small         64  bf16  adamw           ckpt  1  default
convnext_tiny     32  fp32  adamw           -     1  default
convnext_tiny     64  amp   adamw           ckpt  1  split
"""

_SNAPSHOTS = (
    "mlp-b4096-amp-adamw-fused",
    "cnn-b256-fp32-sgd",
    "gan-b128-fp32-adam",
    "lstm-b32-fp32-adamw",
    "vae-b512-amp-adamw-fused-acc4",
    "attention-b64-amp-adamw-ckpt",
    "encoder-b32-fp32-adamw-loop-acc4-split",
    "mobilenet-b128-amp-adamw-expandable",
    "unet-b32-amp-adamw-ckpt-roundup",
    "translator-b64-fp32-adamw",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One training step to record."""

    workload: str
    batch_size: int
    precision: str
    optimizer: str
    recomputes: bool
    accumulation_steps: int
    allocator: str

    @property
    def name(self) -> str:
        """Return the name, which says everything that distinguishes the entry."""
        parts = [self.workload, f"b{self.batch_size}", self.precision, self.optimizer]
        parts += ["ckpt"] if self.recomputes else []
        parts += [f"acc{self.accumulation_steps}"] if self.accumulation_steps > 1 else []
        parts += [self.allocator] if self.allocator != "default" else []
        return "-".join(parts)

    @property
    def about(self) -> Workload:
        """Return the model, batch and loss."""
        return WORKLOADS[self.workload]


def all_entries() -> tuple[Entry, ...]:
    """Return the whole list, in its order."""
    return tuple(_entry(line) for line in _TABLE.strip().splitlines())


def possible_entries(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Leave out what needs a package that is not installed; nothing is imported."""
    return tuple(entry for entry in entries if _is_installed(entry.about.library))


def varied(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Take one entry of each workload, then the next of each: a cut leaves all of them covered."""
    place: dict[str, int] = {}
    turns = []
    for entry in entries:
        turns.append(place.get(entry.workload, 0))
        place[entry.workload] = turns[-1] + 1
    order = sorted(range(len(entries)), key=lambda index: (turns[index], index))
    return tuple(entries[index] for index in order)


def snapshot_names(entries: tuple[Entry, ...], num_snapshots: int) -> frozenset[str]:
    """Choose the entries of which a memory snapshot is kept; their traces are short."""
    names = {entry.name for entry in entries}
    return frozenset([name for name in _SNAPSHOTS if name in names][:num_snapshots])


def split_of(row_id: str) -> str:
    """Put a row in one of two halves, by its id alone, before anything is measured."""
    digest = hashlib.sha256(row_id.encode()).digest()
    return "development" if digest[0] % 2 == 0 else "held-out"


def fields_of(entry: Entry) -> dict[str, Any]:
    """Describe an entry in the fields of a row, as far as they are known before it is measured."""
    about = entry.about
    dtype = "bfloat16" if entry.precision == "bf16" else "float32"
    detail: dict[str, Any] = {"parameters": dtype, "autocast": entry.precision == "amp"}
    if entry.precision == "amp":
        detail |= {"autocast_dtype": "bfloat16", "grad_scaler": False}
    constructor: dict[str, Any] = {"call": about.call, "train_mode": True, "moved_with": ".to()"}
    constructor |= {"cls": about.cls} if about.cls else {}
    constructor |= {"turns": list(about.turns)} if about.turns else {}
    if about.library == "transformers":
        constructor["use_cache"] = False
    kind, kwargs = OPTIMIZERS[entry.optimizer]
    return {
        "precision": entry.precision,
        "precision_detail": detail,
        "model": entry.workload,
        "model_library": about.library,
        "constructor": constructor,
        "model_config": dict(about.config) or None,
        "input": [_tensor(each, entry.batch_size, dtype) for each in about.inputs],
        "batch_size": entry.batch_size,
        "seq_len": None,
        "attention": "transformers default" if about.library == "transformers" else None,
        "optimizer": f"torch.optim.{kind}",
        "optimizer_kwargs": dict(kwargs),
        "loss": about.loss,
        "zero_grad": "start_of_step, set_to_none=True",
        "steps": {"warmup": 1, "measured": 1},
        "accumulation_steps": entry.accumulation_steps,
        "gradient_checkpointing": (
            {"enabled": True, "use_reentrant": False} if entry.recomputes else False
        ),
        "lora": None,
        "quantization": None,
    }


def _tensor(tensor: tuple[str, tuple[int | str, ...], str], batch: int, dtype: str) -> Any:
    name, shape, kind = tensor
    sizes = [batch if each == BATCH else each for each in shape]
    return {"name": name, "shape": sizes, "dtype": dtype if kind == REAL else kind}


def _entry(line: str) -> Entry:
    workload, batch, precision, optimizer, recomputes, accumulation, allocator = line.split()
    return Entry(
        workload=workload,
        batch_size=int(batch),
        precision=precision,
        optimizer=optimizer,
        recomputes=recomputes == "ckpt",
        accumulation_steps=int(accumulation),
        allocator=allocator,
    )


def _is_installed(library: str) -> bool:
    """Look for a package; vision packages may lie in a folder of their own, see ``accuracy``."""
    places = [*sys.path, str(Path(sys.prefix) / "accuracy")]
    return library == "custom" or PathFinder.find_spec(library, places) is not None
