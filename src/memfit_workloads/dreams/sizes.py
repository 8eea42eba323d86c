"""The sizes that define a DreaMS model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import UsageError
from memfit_workloads.model_sizes import ModelSizes

PER_KEY, PAIRWISE = "per_key", "pairwise"
FUSED, PLAIN = "fused", "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class DreamsSizes(ModelSizes):
    """Everything needed to build the backbone again; the defaults are the document's.

    Source: Bushuiev et al., Nature Biotechnology 2025, doi 10.1038/s41587-025-02663-3.
    """

    d_fourier: int = 980
    d_peak: int = 44
    n_layers: int = 7
    n_heads: int = 8
    fourier_width: int = 512
    fourier_depth: int = 5
    dropout: float = 0.1
    max_mz: float = 1000.0
    mz_accuracy: float = 1e-4
    """The finest period of the Fourier features, in Da."""
    mz_bin: float = 0.05
    """Width of a class of the masked m/z, in Da."""
    bias_form: str = PER_KEY
    """``pairwise`` builds the document's (B, n, n, d_fourier) tensor, to compare with."""
    attention: str = FUSED
    fourier_chunk: int = 256
    """Frequencies at a time; 0 builds all features at once, as the document does."""
    loss_rows: int = 512
    """Masked peaks whose logits exist at a time; 0 builds all at once."""

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads:
            msg = (
                f"--d_fourier {self.d_fourier} + --d_peak {self.d_peak} = {self.d_model} is no "
                f"multiple of --n_heads {self.n_heads}. Change one of them."
            )
            raise UsageError(msg)

    @property
    def d_model(self) -> int:
        """Return the width of a token."""
        return self.d_fourier + self.d_peak

    @property
    def num_mz_bins(self) -> int:
        """Return the classes of the masked m/z."""
        return round(self.max_mz / self.mz_bin)


DOCUMENT = DreamsSizes()
