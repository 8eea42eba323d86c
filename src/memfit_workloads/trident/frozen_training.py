"""Training around frozen branches: their embeddings computed once, then everything from those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import memfit
from memfit.errors import MemfitError, NoPlanFitsError
from memfit.job import Job
from memfit.observe.peaks import peaks_on
from memfit.session.storages import owned_tensors
from memfit.units import format_bytes
from memfit_workloads.planned_memory import PlannedMemory, devices

from .branches import BranchSettings
from .clips import Clips, collate
from .embedding_cache import CachedClips, EmbeddingCache, Read
from .frozen_branches import (
    FrozenBranches,
    frozen_branches,
    job_on_embeddings,
    job_with_frozen_branches,
)
from .precision_plan import plan_with_precision
from .sources import Splits

if TYPE_CHECKING:
    from pathlib import Path

    from memfit import Prediction

    from .settings import TridentSettings

_PARTS = ("train", "valid", "test")
_NUMERICS = "different"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMemory(PlannedMemory):
    """The plan of training on embeddings, and what computing these takes."""

    frozen: tuple[str, ...]
    embedding: Prediction
    embedding_batch_size: int

    def to_json(self) -> dict[str, Any]:
        """Return what config.json and the result say of it."""
        return {
            **PlannedMemory.to_json(self),
            "frozen_branches": list(self.frozen),
            "embedding_batch_size": self.embedding_batch_size,
            "predicted_embedding_peak_bytes": self.embedding.peak_allocated_bytes,
        }


class FrozenTraining:
    """Frozen branches of one run: the job of the rest, its plan, and its batches."""

    def __init__(self, settings: TridentSettings, job: Job, clips: Splits) -> None:
        told = settings.branches
        self.told: BranchSettings = told
        self.branches: FrozenBranches = frozen_branches(
            settings.sizes, told.frozen, seed=settings.random_seed, checkpoint=told.freeze_from
        )
        self.job = job_on_embeddings(job, settings.sizes, told.frozen)
        self.measured_embedding_peak_bytes: int | None = None
        """None where nothing was computed, as the embeddings were there."""
        self._whole_job = job_with_frozen_branches(job, told.frozen)
        self._full_batch = job.batch
        self._fingerprint = self.branches.fingerprint()
        self._clips = clips
        self._readers: dict[str, Read] = {}

    def plan(self, settings: TridentSettings) -> FrozenMemory:
        """Find the plan to train under, and how many clips to embed at a time.

        What training takes as it is, is what the whole model takes with the same branches frozen.

        Raises:
            NoPlanFitsError: if a step, or embedding a single clip, takes more than the budget.
        """
        memory = settings.memory_settings
        _, device = devices(memory.device)
        plain, budget_bytes = None, memory.budget_bytes
        if memory.budget_fraction is not None:
            plain = memfit.predict(self._whole_job, device=device)
            budget_bytes = memory.budget_beside(plain.bounded_bytes())
        embedding_batch_size, embedding = self._embedding_plan(device, budget_bytes)
        bounded = replace(memory, budget_fraction=None, budget_bytes=budget_bytes)
        planned = plan_with_precision(self.job, bounded, settings.micro_batch_size, self.told.kept)
        return FrozenMemory(
            job=self.job,
            plan=planned.plan,
            plain=plain or memfit.predict(self._whole_job, device=device),
            planned=replace(planned.planned, numerics=_NUMERICS),
            budget_bytes=planned.budget_bytes,
            run_device=planned.run_device,
            frozen=self.told.frozen,
            embedding=embedding,
            embedding_batch_size=embedding_batch_size,
        )

    def _embedding_plan(self, device: str, budget_bytes: int | None) -> tuple[int, Prediction]:
        """Halve the number of clips until embedding them fits."""
        num_clips = min(self.job.batch_size, len(self._clips.train))
        while True:
            found = self._predicted_embedding(device, num_clips)
            fits = found.fits if budget_bytes is None else found.bounded_bytes() <= budget_bytes
            if fits is not False:
                return num_clips, found
            if num_clips == 1:
                break
            num_clips = -(-num_clips // 2)
        limit_bytes = budget_bytes if budget_bytes is not None else found.budget_bytes
        assert limit_bytes is not None, "without one everything fits"
        remedy = "Raise --budget, or lower --num-frames, --height or --width."
        raise NoPlanFitsError(
            limit_bytes,
            found.bounded_bytes(),
            found.bounded_parts(),
            ("embedding one clip",),
            (remedy,),
        )

    def _predicted_embedding(self, device: str, num_clips: int) -> Prediction:
        """Predict what it takes to embed so many clips, the weights of the branches included."""

        def setup() -> Callable[[], object]:
            where = "cpu" if device == "cpu" else "cuda"
            whole = self._whole_job.model()
            branches = FrozenBranches({name: getattr(whole, name) for name in self.told.frozen})
            branches.requires_grad_(False).to(where)
            del whole
            batch = self._full_batch(num_clips)
            inputs = {name: batch[name].to(where) for name in self.told.frozen}
            beside = batch if device == "cpu" else {}  # where it lies in the device's own memory

            def step() -> object:
                return branches.embed({**beside, **inputs})

            return step

        return memfit.predict_step(setup, device, num_steps=1)

    def lines(self, planned: FrozenMemory) -> list[str]:
        """Say what is trained, and what is computed once."""
        frozen = " and ".join(self.told.frozen)
        source = self.told.freeze_from
        weights = f"weights of {source}" if source else "untrained weights; see --freeze-from"
        problem = (
            f"frozen: {frozen} ({weights}). The rest is trained on their embeddings, which is "
            f"another training problem ({_NUMERICS}): no loss of theirs, no gradient into them. "
            '"As it is" means the whole model with them frozen.'
        )
        peak = format_bytes(planned.embedding.peak_allocated_bytes)
        size = planned.embedding_batch_size
        return [
            problem,
            f"embeddings: computed once, {size} clips at a time; predicted peak {peak}",
        ]

    def prepare(
        self,
        settings: TridentSettings,
        planned: FrozenMemory,
        read: Callable[[Clips, Sequence[int]], dict[str, Tensor]] = collate,
    ) -> list[str]:
        """Have the embeddings of all clips in the run's folder, and say what was done.

        Raises:
            DataError: if they cannot be written.
            MemfitError: if an embedding holds what is no number.
        """
        cache = EmbeddingCache(
            folder=settings.output_dir, branches=self.branches, sizes=settings.sizes
        )
        lines: list[str] = []
        paths: list[Path] = []
        for part in _PARTS:
            clips: Clips = getattr(self._clips, part)
            path = cache.path(part, clips)
            records = cache.opened(path, len(clips))
            if records is None:
                batches = self._embedded(clips, planned, read)
                cache.write(path, len(clips), batches)
                records = cache.opened(path, len(clips))
                assert records is not None, "it was just written"
                lines.append(f"embedded {len(clips)} clips of {part}: {path}")
            else:
                lines.append(f"embeddings of {len(clips)} clips of {part} are there: {path}")
            paths.append(path)
            self._readers[part] = CachedClips(
                records=records,
                clips=None if cache.holds_all else clips,
                frozen=self.told.frozen,
                read=read,
            )
        cache.remove_others(paths)
        self.branches.cpu()
        return lines

    def _embedded(
        self,
        clips: Clips,
        planned: FrozenMemory,
        read: Callable[[Clips, Sequence[int]], dict[str, Tensor]],
    ) -> Iterator[dict[str, Tensor]]:
        """Read clips batch by batch and add the embeddings; the first is measured."""
        device = planned.run_device
        branches = self.branches.to(device)
        size = planned.embedding_batch_size
        for begin in range(0, len(clips), size):
            rows = range(begin, min(begin + size, len(clips)))
            batch = read(clips, rows)
            inputs = {name: batch[name].to(device) for name in self.told.frozen}
            embed = partial(branches.embed, inputs)
            is_first = self.measured_embedding_peak_bytes is None
            beside = batch if device == "cpu" else inputs
            embeddings = self._measured(embed, branches, beside) if is_first else embed()
            for name, values in embeddings.items():
                is_good = values.isfinite().all(dim=1)
                if not bool(is_good.all()):
                    row = rows[int((~is_good).nonzero()[0])]
                    msg = (
                        f"{name} of clip {row} holds what is no number, so nothing can be trained "
                        "on it. Look at that clip, or give --freeze-from another checkpoint."
                    )
                    raise MemfitError(msg)
            yield {**batch, **embeddings}

    def _measured(
        self,
        embed: Callable[[], dict[str, Tensor]],
        branches: FrozenBranches,
        batch: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Embed a batch and keep what it took, weights and batch included."""
        device_type = next(branches.parameters()).device.type
        peaks = peaks_on(device_type)
        nothing = torch.optim.SGD(branches.parameters())
        peaks.begin(0, list(owned_tensors(branches, nothing, dict(batch))))
        found = embed()
        self.measured_embedding_peak_bytes = peaks.end().measured_peak_bytes
        peaks.close()
        return found

    def reader(self, part: str) -> Read:
        """Return what puts batches of a part of the data together, once it is prepared."""
        return self._readers[part]

    def data_config(self) -> dict[str, Any]:
        """Return what a continuation has to find again."""
        return {
            "frozen_branches": list(self.told.frozen),
            "frozen_weights": self._fingerprint,
        }
