"""What strategies and the planner need to know of a job, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from memfit.separation.separation import Separation

_DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Describe a job to the strategies."""

    batch_size: int
    device_type: str
    batch_norms: tuple[str, ...]
    """Modules whose training statistics couple the samples of a batch."""
    has_dropout: bool
    """Whether a module draws random masks; see ``draws_random`` too."""
    block_levels: tuple[tuple[str, ...], ...]
    """Names of repeated modules: the outermost repetition first, then the ones inside it."""
    optimizer: str
    optimizer_implementations: tuple[str, ...]
    """The implementations that this optimizer offers, the one it uses by itself last."""
    streamable_candidates: int | None
    """The most candidates that a streamable loss of the step scores; 0 for none, None where no
    step has been seen yet."""
    streamable_chunk: int = 1
    """The fewest of them that are worth streaming at a time."""
    linear_cross_entropy_classes: int | None = None
    """The most classes that a linear layer scores for nothing but a cross-entropy; 0 for none, None
    where no step has been seen yet."""
    linear_cross_entropy_rows: int = 0
    """The most rows that it scores at once."""
    module_names: tuple[str, ...] = ()
    """Every module below the model, by name."""
    clips_gradients: bool = False
    """Whether the global gradient norm is clipped, so that every gradient is needed at once."""
    tileable_blocks: tuple[str, ...] = ()
    """The outermost modules that treat positions (tokens, space, time) apart."""
    tileable_blocks_with_dropout: tuple[str, ...] = ()
    """Those of them that draw random masks."""
    blocks_with_effects: tuple[tuple[str, str], ...] = ()
    """Modules that only their effects keep from being tileable: name and sentence."""
    optimizer_package: str = "torch.optim"
    """The package that the optimizer comes from."""
    optimizer_options: tuple[str, ...] = ()
    """The optimizer's settings that are neither zero, False nor None in some parameter group."""
    optimizer_attachments: tuple[str, ...] = ()
    """What has been attached to the optimizer's step; see memfit.session.optimizer_facts."""
    parameter_dtypes: tuple[str, ...] = ()
    """The types of the parameters that are trained."""
    modules_in_evaluation: tuple[str, ...] = ()
    """The outermost modules in evaluation mode; see memfit.session.evaluation_mode."""
    lstms: tuple[str, ...] = ()
    """Modules that are an LSTM, which the CPU does not train in every type."""
    explicit_attention: tuple[str, ...] = ()
    """Modules that may compute attention scores as whole matrices and could do without."""
    draws_random: bool | None = None
    """Whether a step draws random numbers at all, by whatever library; None where no step has been
    seen yet."""
    attention_may_drop: bool = False
    """Whether those modules may draw random masks over attention weights."""
    separation: Separation | None = field(default=None, compare=False, repr=False)
    """Says whether pieces of a batch keep the results; None where that cannot be asked."""
