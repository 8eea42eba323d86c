"""The influence scans of one tracing, and what they take."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memfit import influence
from memfit.devices.catalogue import current_device_name
from memfit.errors import DeviceUnavailableError
from memfit.units import format_bytes, format_seconds
from memfit_workloads.conve.model import ConvE
from memfit_workloads.conve.queries import Queries
from memfit_workloads.conve.settings import K_VS_ALL

from .arguments import BOTH, ROW
from .checkpoints import FoundCheckpoint
from .findings import Finding, Findings, Influence, NamedTriple
from .labels import Labels
from .losses import TripleLoss, Triples, description_of
from .measuring import ScanPeaks
from .progress import Listener
from .questions import Question
from .settings import TracinSettings

Numbers = npt.NDArray[np.float64]
_CPU, _CUDA = "cpu", "cuda"
_USUAL_CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a tracing takes: its scans come one after the other."""

    device: str
    scans: Sequence[influence.ScanPrediction]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "predicted_peak_bytes": max(each.peak_allocated_bytes for each in self.scans),
            "predicted_process_bytes": max(each.process_bytes for each in self.scans),
            "predicted_seconds": sum(each.seconds for each in self.scans),
            "train_chunk": self.scans[0].train_chunk,
            "test_chunk": self.scans[0].test_chunk,
            "num_steps": sum(each.num_steps for each in self.scans),
        }

    def sentence(self) -> str:
        """Say it in one line."""
        told = self.as_json()
        return (
            f"Predicted on {self.device}: peak {format_bytes(told['predicted_peak_bytes'])} with "
            f"{told['train_chunk']} training triples at a time, at most "
            f"{format_seconds(told['predicted_seconds'])} for {told['num_steps']} steps."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Scans:
    """A model, the triples to compare, and the checkpoints to do it under."""

    settings: TracinSettings
    question: Question
    checkpoints: Sequence[FoundCheckpoint]
    model: ConvE
    known: Queries
    loss: TripleLoss

    @classmethod
    def of(
        cls,
        settings: TracinSettings,
        question: Question,
        checkpoints: Sequence[FoundCheckpoint],
    ) -> Self:
        """Build the model, on the device where it is to be traced.

        Raises:
            DeviceUnavailableError: if that device is not in this machine.
        """
        graph = question.graph
        loss = TripleLoss(
            loss=settings.loss,
            triple_loss=settings.triple_loss,
            label_smoothing=question.label_smoothing,
            use_mixed_precision=settings.use_mixed_precision,
        )
        model = ConvE(checkpoints[0].sizes).to(checkpoints[0].dtype)
        return cls(
            settings=settings,
            question=question,
            checkpoints=checkpoints,
            model=model.to(_place(settings)),
            known=Queries.grouped(graph.train, graph.num_relations),
            loss=loss,
        )

    @property
    def device(self) -> str:
        """Return the device's name in the catalogue."""
        asked = self.settings.device
        if self.settings.dry_run and asked not in (None, _CPU, _CUDA):
            return str(asked)
        kind = self.model.entity_bias.device.type
        return _CPU if kind == _CPU else current_device_name()

    def predict(self) -> Predicted:
        """Predict the peak and the time; a few triples are proved, nothing is scanned.

        Raises:
            MemfitError: if it cannot be predicted, or nothing fits into the budget.
        """
        own = self.question.train[self.groups.first]
        if self.settings.has_test and self.settings.top_k is not None:
            # Only what is listed is compared with itself.
            own = own[: 2 * self.settings.top_k * len(self.question.test_rows)]
        scans = [self._own_scan(own)]
        if self.settings.has_test:
            scans.insert(0, self._pair_scan())
        predicted = [scan.predict(self.device) for scan in scans]
        return Predicted(device=self.device, scans=predicted)

    def find(self, labels: Labels, folder: Path | None, listener: Listener) -> Findings:
        """Scan, and name what was found.

        Raises:
            MemfitError: if a score is no number, or a checkpoint or the folder cannot be used.
        """
        if not self.settings.has_test:
            found, own_scores = self._own_scores(self.question.train_rows, folder, listener)
            order = np.argsort(-own_scores, kind="stable")[: self.settings.top_k]
            own = [
                self._influence(int(place), labels, float(own_scores[place]), own_scores[place])
                for place in order
            ]
            return Findings(about=self._how(found), by_test=(), own=own)
        scan = self._pair_scan(folder)
        with self.peaks.watching(listener) as watching:
            scores = replace(scan, listener=watching).scores()
        extremes = [self._extremes(scores, place) for place in range(len(self.question.test_rows))]
        places = sorted({place for each in extremes for place in each})
        inner = None if folder is None else folder / "self"
        rows = self.question.train_rows[torch.tensor(places, dtype=torch.int64)]
        _, of_places = self._own_scores(rows, inner, listener)
        own_of = dict(zip(places, of_places.tolist(), strict=True))
        findings = []
        for test_row, by_place in zip(self.question.test_rows, extremes, strict=True):
            influences = [
                self._influence(place, labels, score, own_of[place])
                for place, score in by_place.items()
            ]
            test = NamedTriple.of(test_row, self.question.graph.test, labels)
            findings.append(Finding(test=test, influences=influences))
        return Findings(about=self._how(scores), by_test=findings, own=())

    def _how(self, found: influence.Scores | influence.SelfInfluence) -> dict[str, Any]:
        """Return how scores were found."""
        return {
            "parameters": list(found.parameters),
            "unread": dict(found.unread),
            "unproved": list(found.unproved),
            "proof_error": found.proof_error,
            "measured_peak_bytes": self.peaks.highest_bytes,
        }

    def _influence(
        self, place: int, labels: Labels, score: float, self_influence: float
    ) -> Influence:
        """Name one of the training triples that are compared."""
        row = int(self.question.train_rows[place])
        return Influence(
            train=NamedTriple.of(row, self.question.graph.train, labels),
            score=score,
            self_influence=float(self_influence),
        )

    def _extremes(self, scores: influence.Scores, place: int) -> dict[int, float]:
        """Return the scores of a test triple by training triple, the highest first."""
        pairs: Iterable[tuple[int, float]]
        if scores.scores is not None:
            of_groups = np.asarray(scores.scores[place])
            pairs = enumerate(of_groups[self.groups.group_of.numpy()].tolist())
        else:
            assert scores.helpful is not None, "the highest are kept where not all are"
            assert scores.harmful is not None, "and the lowest"
            number = self.settings.top_k or len(self.groups.group_of)
            pairs = chain(
                self.groups.spread(scores.helpful, place, number),
                self.groups.spread(scores.harmful, place, number),
            )
        return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))

    def sentence(self) -> str:
        """Say in one line what is compared with what."""
        number = len(self.checkpoints)
        test = "each with itself"
        if self.settings.has_test:
            test = f"against {len(self.question.test_rows)} test triples"
        num_groups = len(self.groups.first)
        shared = "" if num_groups == len(self.question.train_rows) else f", {num_groups} rows,"
        what = description_of(self.settings.loss, self.settings.triple_loss, self.settings.sides)
        return (
            f"{len(self.question.train_rows)} training triples{shared} {test}, under {number} "
            f"checkpoint{'s' if number > 1 else ''} on {self.device}; a triple's loss is {what}."
        )

    def definition(self) -> dict[str, Any]:
        """Return what makes it this tracing and no other."""
        triples = torch.cat([self.question.train, self.question.test])
        return {
            "mode": self.settings.mode,
            "loss": self.settings.loss,
            "triple_loss": self.settings.triple_loss,
            "sides": self.settings.sides,
            "training_target": self.question.training_target,
            "label_smoothing": self.question.label_smoothing,
            "use_mixed_precision": self.settings.use_mixed_precision,
            "triples": zlib.crc32(triples.numpy().tobytes()),
        }

    def about(self) -> dict[str, Any]:
        """Return how scores are found, as JSON has it."""
        told = self.definition()
        del told["triples"]
        return {
            **told,
            "loss_in_words": description_of(told["loss"], told["triple_loss"], told["sides"]),
            "checkpoints": [
                {
                    "file": str(each.path),
                    "epoch": each.epoch,
                    "learning_rate": each.learning_rate,
                }
                for each in self.checkpoints
            ],
            "train": str(self.question.files.train),
            "test": str(self.question.files.test) if self.settings.has_test else None,
            "num_train": len(self.question.train_rows),
            "num_train_rows": len(self.groups.first),
            "num_test": len(self.question.test_rows),
            "device": self.device,
            "budget_bytes": self.settings.budget_bytes,
        }

    @cached_property
    def peaks(self) -> ScanPeaks:
        """Return what measures the scans."""
        sizes = frozenset(each.path.stat().st_size for each in self.checkpoints)
        return ScanPeaks(model=self.model, mapped_bytes=sizes)

    @cached_property
    def groups(self) -> _SameRows:
        """Return which of the training triples have the same loss."""
        return self._groups_of(self.question.train)

    def _groups_of(self, triples: Tensor) -> _SameRows:
        is_row_alone = (
            self.settings.triple_loss == ROW
            and self.settings.sides != BOTH
            and self.question.training_target == K_VS_ALL
        )
        return _SameRows.of(triples, self.known if is_row_alone else None)

    def _pair_scan(self, folder: Path | None = None) -> influence.Scan:
        """Return the scan of test triples against training triples.

        What it is asked about is data, which is there before the peak is watched.
        """
        return influence.Scan(
            train=self._samples(self.question.train[self.groups.first]),
            test=self._samples(self.question.test),
            top_k=self.settings.top_k,
            folder=folder,
            **self._given(),
        )

    def _own_scan(self, triples: Tensor, folder: Path | None = None) -> influence.Scan:
        """Return the scan of triples (n, 3), each with itself."""
        return influence.Scan(train=self._samples(triples), folder=folder, **self._given())

    def _own_scores(
        self, rows: Tensor, folder: Path | None, listener: Listener
    ) -> tuple[influence.SelfInfluence, Numbers]:
        """Scan training triples, lines (n,), each with itself, and return a score for each."""
        triples = self.question.graph.train[rows]
        groups = self._groups_of(triples)
        scan = self._own_scan(triples[groups.first], folder)
        with self.peaks.watching(listener) as watching:
            found = replace(scan, listener=watching).self_influence()
        return found, found.scores[groups.group_of.numpy()]

    def _samples(self, triples: Tensor) -> influence.Samples:
        return Triples(
            triples=triples,
            known=self.known,
            sides=self.settings.sides,
            training_target=self.question.training_target,
            triple_loss=self.settings.triple_loss,
        ).samples()

    def _given(self) -> dict[str, Any]:
        """Return what all scans have in common."""
        size = self.settings.batch_size or _USUAL_CHUNK
        return {
            "model": self.model,
            "loss": self.loss,
            "checkpoints": [
                influence.Checkpoint.of_file(each.path, each.learning_rate, key="model_state_dict")
                for each in self.checkpoints
            ],
            "parameters": self.settings.layers,
            "unproved": self.settings.unproved,
            "budget": self.settings.budget_bytes,
            "train_chunk": size,
            "test_chunk": size,
        }


def _place(settings: TracinSettings) -> torch.device:
    """Return where the model goes; a dry run for another card stays on the host."""
    asked = settings.device
    if asked in (None, _CUDA) and torch.cuda.is_available():
        return torch.device(_CUDA)
    if asked in (None, _CPU) or (settings.dry_run and asked != _CUDA):
        return torch.device(_CPU)
    raise DeviceUnavailableError(str(asked), "--device is cpu or cuda here")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SameRows:
    """Groups of triples, each with one that stands for it.

    A training row is (head, relation) with all its tails, so triples that share it share its
    gradient, and all their scores.
    """

    first: Tensor
    """(g,) int64: the triple that stands for each group."""
    group_of: Tensor
    """(n,) int64: the group of each triple."""
    members: Tensor
    """(n,) int64: triples, those of a group together and in rising order."""
    ends: Tensor
    """(g + 1,) int64: where the members of each group begin and end."""

    @classmethod
    def of(cls, triples: Tensor, known: Queries | None) -> Self:
        """Group triples (n, 3) by the known query that each answers; None leaves each alone."""
        if known is None:
            numbers = torch.arange(len(triples))
            return cls(
                first=numbers,
                group_of=numbers,
                members=numbers,
                ends=torch.arange(len(triples) + 1),
            )
        rows, _ = known.rows_of(triples[:, 0], triples[:, 1])
        _, group_of, counts = torch.unique(rows, return_inverse=True, return_counts=True)
        members = group_of.argsort(stable=True)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(first=members[ends[:-1]], group_of=group_of, members=members, ends=ends)

    def of_group(self, group: int) -> list[int]:
        """Return the triples of a group."""
        members: list[int] = self.members[self.ends[group] : self.ends[group + 1]].tolist()
        return members

    def spread(
        self, ranked: influence.Ranked, place: int, number: int
    ) -> Iterator[tuple[int, float]]:
        """Yield so many triples with their scores, in the order in which groups are ranked."""
        pairs = zip(ranked.indices[place], ranked.scores[place], strict=True)
        for group, score in pairs:
            for triple in self.of_group(group)[:number]:
                yield triple, score
                number -= 1
            if not number:
                return
