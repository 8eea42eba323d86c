"""Frozen branches as another training problem: the rest of the model, on embeddings.

Shape suffixes: B samples, E embedding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from memfit.errors import DataError
from memfit.job import Job
from memfit_workloads.checkpoint_files import read_checkpoint

from .model import as_inputs, build_model, embedding_key
from .sizes import TridentSizes

_TARGETS = {"rgb": ("mask", "has_mask"), "infrared": ("boxes", "has_boxes"), "kinematics": ()}
"""What is in a batch for the losses of a branch alone."""
_REMEDY = "Give --freeze-from another checkpoint, such as best_model.pt of a run."


def without_branches(batch: Mapping[str, Tensor], frozen: Sequence[str]) -> dict[str, Tensor]:
    """Leave out what only some branches look at or are trained on."""
    return without_targets({name: batch[name] for name in batch if name not in frozen}, frozen)


def without_targets(batch: Mapping[str, Tensor], frozen: Sequence[str]) -> dict[str, Tensor]:
    """Leave out what only some branches are trained on."""
    targets = {target for branch in frozen for target in _TARGETS[branch]}
    return {name: part for name, part in batch.items() if name not in targets}


def embedding_widths(sizes: TridentSizes) -> dict[str, int]:
    """Return how many numbers each branch says of a clip."""
    return {
        "rgb": sizes.image_dim,
        "infrared": sizes.thermal_dim,
        "kinematics": sizes.motion_dim,
    }


def job_on_embeddings(job: Job, sizes: TridentSizes, frozen: Sequence[str]) -> Job:
    """Describe a step of the rest of the model, which is given the frozen branches' embeddings."""
    widths = embedding_widths(sizes)

    def model() -> nn.Module:
        whole = job.model()
        for branch in frozen:
            delattr(whole, branch)
        return whole

    def batch(num_samples: int) -> dict[str, Tensor]:
        given = {embedding_key(name): torch.zeros(num_samples, widths[name]) for name in frozen}
        return without_branches(job.batch(num_samples), frozen) | given

    return replace(job, model=model, batch=batch)


def job_with_frozen_branches(job: Job, frozen: Sequence[str]) -> Job:
    """Describe a step of the whole model that trains the same, and runs the frozen branches."""

    def model() -> nn.Module:
        whole = job.model()
        for branch in frozen:
            whole.get_submodule(branch).requires_grad_(False)
        return whole

    return replace(job, model=model, batch=lambda size: without_targets(job.batch(size), frozen))


class FrozenBranches(nn.ModuleDict):
    """Branches whose weights stay as they are."""

    def embed(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the embedding (B, E) of each branch for what it looks at, by its key."""
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, branch in self.items():
                embed: Callable[[Tensor], Tensor] = branch.embed  # type: ignore[assignment]  # untyped members
                found[embedding_key(name)] = embed(as_inputs(name, batch[name]))
        return found

    def whole_state(self, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put their weights beside those of the rest of the model, on the host."""
        own = {name: value.cpu() for name, value in self.state_dict().items()}
        return {**own, **rest}

    def rest_of(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take their weights out of a whole model's."""
        return {name: whole[name] for name in whole if name.partition(".")[0] not in self}

    def fingerprint(self) -> str:
        """Return what no other weights have."""
        found = hashlib.sha256()
        for name, value in sorted(self.state_dict().items()):
            found.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            found.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def frozen_branches(
    sizes: TridentSizes, frozen: Sequence[str], *, seed: int, checkpoint: Path | None
) -> FrozenBranches:
    """Build branches with the weights of a checkpoint; without one, with those of a seed.

    Raises:
        DataError: if the checkpoint cannot be read, or is of a model of other sizes.
    """
    whole = build_model(sizes, seed)
    branches = FrozenBranches({name: getattr(whole, name) for name in frozen})
    if checkpoint is not None:
        _load(branches, checkpoint)
    return branches.requires_grad_(False)


def _load(branches: FrozenBranches, path: Path) -> None:
    """Take the weights of some branches out of a checkpoint of the whole model."""
    content = read_checkpoint(path, "TRIDENT-Net", ("model_state_dict",), remedy=_REMEDY)
    found = content["model_state_dict"]
    state = branches.state_dict()
    for name, own in state.items():
        if name not in found or found[name].shape != own.shape:
            there = tuple(found[name].shape) if name in found else "nothing"
            reason = (
                f"it is of another model: {name} is {there} there, and {tuple(own.shape)} is "
                "needed. Give --model and sizes of that run, or another checkpoint."
            )
            raise DataError(str(path), reason)
    branches.load_state_dict({name: found[name] for name in state})
    bad = [name for name, value in branches.state_dict().items() if not value.isfinite().all()]
    if bad:
        reason = f"{bad[0]} holds what is no number. {_REMEDY}"
        raise DataError(str(path), reason)
