"""What is chosen of DeepSpeed's ZeRO: the stage, what waits outside the device, and the buckets."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import UsageError

NONE, CPU_MEMORY, NVME = "none", "cpu", "nvme"
FP32, BF16, FP16 = "fp32", "bf16", "fp16"
SHARDS_WEIGHTS = 3
"""The stage from which on parameters are spread over the ranks."""
_STAGES = range(SHARDS_WEIGHTS + 1)
_PLACES = (NONE, CPU_MEMORY, NVME)
_PRECISIONS = (FP32, BF16, FP16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroChoice:
    """Choose how an engine of DeepSpeed keeps what ranks share, and how it computes.

    Buckets and thresholds are numbers of elements, as in DeepSpeed; those left out are its own
    (deepspeed/runtime/zero/config.py, 0.19.8).

    Raises:
        UsageError: if the parts contradict each other, with the names of both.
    """

    stage: int = 2
    """0 shares nothing, 1 the optimizer's states, 2 gradients as well, 3 parameters as well."""
    micro_batch_size: int | None = None
    """The samples of one pass on one rank; None runs a rank's batch whole."""
    offload_optimizer: str = NONE
    """Where states and the update are: ``none`` (the device), ``cpu`` or ``nvme``."""
    offload_parameters: str = NONE
    """Where shards of parameters wait: ``none`` (the device), ``cpu`` or ``nvme``."""
    nvme_folder: str | None = None
    precision: str = FP32
    reduce_bucket_elements: int = 500_000_000
    allgather_bucket_elements: int = 500_000_000
    prefetch_bucket_elements: int = 50_000_000
    persistence_elements: int = 100_000
    """Parameters smaller than this stay whole on every rank in stage 3."""
    max_live_elements: int = 1_000_000_000
    contiguous_gradients: bool = True

    def __post_init__(self) -> None:
        _check_word("stage", self.stage, _STAGES)
        _check_word("offload_optimizer", self.offload_optimizer, _PLACES)
        _check_word("offload_parameters", self.offload_parameters, _PLACES)
        _check_word("precision", self.precision, _PRECISIONS)
        for reason in _contradictions(self):
            raise UsageError(f"This choice cannot be: {reason}")

    @property
    def shards_weights(self) -> bool:
        """Return whether parameters are spread over the ranks."""
        return self.stage == SHARDS_WEIGHTS


def _check_word(name: str, value: object, known: object) -> None:
    if value not in known:  # type: ignore[operator]  # a range or a tuple
        words = ", ".join(map(str, known))  # type: ignore[call-overload]
        raise UsageError(f"{name} is {value!r}, and has to be one of: {words}.")


def _contradictions(choice: ZeroChoice) -> list[str]:
    """Say what of a choice contradicts what; read in deepspeed 0.19.8."""
    places = (choice.offload_optimizer, choice.offload_parameters)
    size, bucket = choice.micro_batch_size, choice.allgather_bucket_elements
    found = {
        f"offload_parameters is {choice.offload_parameters} and stage is {choice.stage}; only "
        "stage 3 has shards of parameters that can wait elsewhere.": (
            choice.offload_parameters != NONE and not choice.shards_weights
        ),
        "offload_optimizer needs stage 1, 2 or 3, which split the states.": (
            choice.offload_optimizer != NONE and choice.stage == 0
        ),
        f"offload_optimizer is nvme and stage is {choice.stage}, where DeepSpeed writes nothing to "
        "disk and keeps states in the host's memory. Say cpu, or take stage 3.": (
            choice.offload_optimizer == NVME and not choice.shards_weights
        ),
        "nvme needs nvme_folder, a folder on that disk.": (
            NVME in places and not choice.nvme_folder
        ),
        f"micro_batch_size is {size}, and has to be at least 1.": size is not None and size < 1,
        f"allgather_bucket_elements is {bucket}, and has to be even.": bucket % 2 == 1,
        "reduce_bucket_elements has to be at least 1.": choice.reduce_bucket_elements < 1,
        f"stage is 0 and precision {choice.precision}: without ZeRO its wrapped optimizer was not "
        "shown to weigh pieces exactly. Take stage 1, 2 or 3.": (
            choice.stage == 0 and choice.precision != FP32
        ),
    }
    return [reason for reason, is_so in found.items() if is_so]
