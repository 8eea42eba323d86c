"""The rows: what the document claims, and the plan that does what it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.devices.spec import CPU
from memfit.strategies import (
    ActivationCheckpointing,
    ActivationOffload,
    Bf16,
    ConvolutionTiling,
    EightBitOptimizer,
    FourBitBase,
    MicroBatching,
    OptimizerOffload,
    Strategy,
)
from memfit_workloads.trident.four_bit import four_bit_base
from memfit_workloads.trident.sizes import TridentSizes

BASELINE, TWO_SAMPLES = "baseline", "two-samples"
EIGHT_BIT, OFFLOAD, FOUR_BIT = "eight-bit-optimizer", "optimizer-offload", "four-bit-base"
ALL_STATES, ADAPTERS_ONLY = "states-and-four-bit", "adapters-only"
BF16, TILED = "bf16", "convolution-tiling-8"
CHECKPOINTED, BF16_CHECKPOINTED = "activation-checkpointing", "bf16-checkpointing"

CPU_SIZES = TridentSizes(
    num_frames=12,
    height=96,
    width=128,
    video_channels=8,
    video_dim=128,
    vision_width=64,
    vision_feedforward=128,
    flash_channels=16,
    plume_width=32,
    plume_dim=64,
    curve_hidden=72,
    curve_dim=64,
    geo_hidden=32,
    geo_dim=48,
    tempo_width=48,
    tempo_feedforward=192,
    class_dim=8,
    fusion_width=128,
    fusion_feedforward=512,
    head_hidden=64,
)
"""The same network with a quarter of every width, small enough to run every row on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the document says of a variant."""

    peak: str
    """In GB, as it is written there."""
    speed: float
    """Against its baseline; below 1 is slower."""
    setup: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a plan is for: strategies that move tensors say to where."""

    device_kind: str
    sizes: TridentSizes

    @property
    def spill(self) -> str:
        """Return where tensors go that leave the device: beside a CPU there is only the disk."""
        return "disk" if self.device_kind == CPU else "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to run the step."""

    name: str
    title: str
    strategies: Callable[[Place], tuple[Strategy, ...]]
    claim: Claim | None = None
    batch_size: int = 1


def _plain(_: Place) -> tuple[Strategy, ...]:
    return ()


def _half(_: Place) -> tuple[Strategy, ...]:
    """Give what all of the document's variants have."""
    return ActivationCheckpointing(), Bf16()


def _offload(place: Place) -> OptimizerOffload:
    return OptimizerOffload(to=place.spill)


def _tiled(num_tiles: int, recompute: float) -> ConvolutionTiling:
    return ConvolutionTiling(num_tiles=num_tiles, recompute=recompute)


DOCUMENT_ROWS: tuple[Row, ...] = (
    Row(
        name=BASELINE,
        title="Baseline (FP32)",
        strategies=_plain,
        claim=Claim(peak="65+", speed=1.0, setup="Low"),
    ),
    Row(
        name=BF16_CHECKPOINTED,
        title="BF16 + Checkpointing",
        strategies=_half,
        claim=Claim(peak="45-50", speed=0.8, setup="Low"),
    ),
    Row(
        name="zero-2",
        title="DeepSpeed ZeRO-2",
        strategies=lambda place: (_offload(place), *_half(place)),
        claim=Claim(peak="30-35", speed=0.7, setup="Medium"),
    ),
    Row(
        name="accelerate",
        title="Accelerate Auto",
        strategies=lambda place: (EightBitOptimizer(), *_half(place)),
        claim=Claim(peak="35-39", speed=0.6, setup="Medium"),
    ),
    Row(
        name="qlora",
        title="QLoRA",
        strategies=lambda place: (four_bit_base(place.sizes), EightBitOptimizer(), *_half(place)),
        claim=Claim(peak="25-30", speed=0.5, setup="High"),
    ),
)
"""The document's table; each plan is what its command asks for. On one rank, ZeRO-2 with offload is
states on the host, which leaves nothing for 8 bits to shrink. What a device map may move are
weights, of which `findings` says how many bytes there are."""

REMEDY_ROWS: tuple[Row, ...] = (
    Row(name=EIGHT_BIT, title="8-bit states", strategies=lambda _: (EightBitOptimizer(),)),
    Row(name=OFFLOAD, title="states off device", strategies=lambda place: (_offload(place),)),
    Row(
        name=FOUR_BIT,
        title="transformers in 4 bits",
        strategies=lambda place: (four_bit_base(place.sizes),),
    ),
    Row(
        name=ALL_STATES,
        title="these three together",
        strategies=lambda place: (four_bit_base(place.sizes), _offload(place)),
    ),
    Row(name=BF16, title="bf16", strategies=lambda _: (Bf16(),)),
    Row(
        name=CHECKPOINTED,
        title="every block recomputed",
        strategies=lambda _: (ActivationCheckpointing(),),
    ),
    Row(
        name="activation-offload",
        title="activations off device",
        strategies=lambda place: (ActivationOffload(to=place.spill),),
    ),
    Row(
        name=TILED,
        title="convolutions in 8 tiles",
        strategies=lambda _: (_tiled(8, 0.1),),
    ),
    Row(
        name="convolution-tiling-24",
        title="convolutions in 24 tiles",
        strategies=lambda _: (_tiled(24, 0.25),),
    ),
    Row(
        name="convolution-tiling-64",
        title="convolutions in 64 tiles",
        strategies=lambda _: (_tiled(64, 0.5),),
    ),
    Row(
        name="convolution-tiling-8-bf16",
        title="8 tiles and bf16",
        strategies=lambda _: (_tiled(8, 0.1), Bf16()),
    ),
    Row(
        name=ADAPTERS_ONLY,
        title="adapters alone trained",
        strategies=lambda _: (FourBitBase(),),
    ),
    Row(name=TWO_SAMPLES, title="two samples", strategies=_plain, batch_size=2),
    Row(
        name="micro-batching",
        title="two, one at a time",
        strategies=lambda _: (MicroBatching(micro_batch_size=1),),
        batch_size=2,
    ),
)
"""What may remove bytes, each alone, and what goes well together."""
ROWS = (*DOCUMENT_ROWS, *REMEDY_ROWS)
