"""Steps of the contrastive training: anchors, positives and negatives as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .sampling import PairSampler, Stage
from .tokens import trimmed
from .tree import Tree

OWN, SHARED = "own", "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How steps are made."""

    batch_size: int
    padding: str = "max_length"
    negatives: str = SHARED
    """``own``: each anchor brings the texts of its negatives; ``shared``: negatives are drawn among
    the anchors and positives of the step, whose texts are encoded once."""
    num_workers: int = 0
    random_seed: int = 42


class StepMaker:
    """Make a step of (anchor, positive) rows.

    Args:
        tree: of all codes.
        table: token ids by channel, (codes, L).
        sampler: of the stage.
        stage: how many negatives are wanted.
        settings: of steps.
    """

    def __init__(
        self,
        tree: Tree,
        table: Mapping[str, Tensor],
        sampler: PairSampler,
        stage: Stage,
        settings: StepSettings,
    ) -> None:
        self._tree, self._table, self._sampler = tree, table, sampler
        self._stage, self._settings = stage, settings

    def __call__(self, rows: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return token ids (B, V, L) by channel, and which of the codes are whose negatives."""
        pairs = np.asarray(rows, dtype=np.int64)
        # The same rows draw the same negatives: a step follows from rows and seed.
        rng = np.random.default_rng([self._settings.random_seed, *pairs.flat])
        codes, places = self._own(pairs, rng) if self._is_own else self._shared(pairs, rng)
        numbers = torch.from_numpy(codes)
        is_negative = torch.from_numpy(places >= 0)
        return {
            "tokens": {
                channel: trimmed(ids[numbers], self._settings.padding)
                for channel, ids in self._table.items()
            },
            "negatives": torch.from_numpy(places).clamp(min=0),
            "is_negative": is_negative,
            "paths": torch.from_numpy(self._tree.paths[codes]),
        }

    @property
    def _is_own(self) -> bool:
        return self._settings.negatives == OWN

    def _shared(self, pairs: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw negatives among the codes of the step."""
        present, first = np.unique(pairs, return_index=True)
        places = np.full((len(pairs), self._stage.n_negatives), -1, dtype=np.int64)
        for row, (anchor, positive) in enumerate(pairs):
            found = self._sampler.negatives(anchor, positive, rng, present)
            places[row, : len(found)] = first[found]
        return pairs, places

    def _own(self, pairs: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw negatives among all codes; their texts come with the row."""
        num, extra = len(pairs), self._stage.n_negatives
        codes = np.concatenate([pairs, np.repeat(pairs[:, :1], extra, 1)], 1)
        places = np.full((num, extra), -1, dtype=np.int64)
        rows = self._sampler.rows
        for row, (anchor, positive) in enumerate(pairs):
            found = rows[self._sampler.negatives(anchor, positive, rng)]
            codes[row, 2 : 2 + len(found)] = found
            places[row, : len(found)] = row * codes.shape[1] + 2 + np.arange(len(found))
        return codes, places


class _Pairs(Dataset[tuple[int, int]]):
    def __init__(self, pairs: np.ndarray) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> tuple[int, int]:
        anchor, positive = self.pairs[row]
        return int(anchor), int(positive)


class RowOrder(Sampler[int]):
    """Go through rows in an order that follows from seed and epoch alone.

    Args:
        num_rows: of an epoch.
        random_seed: of the order.
        epoch: the first one.
        num_done: rows of the first epoch that an earlier run has gone through.
    """

    def __init__(self, num_rows: int, random_seed: int, *, epoch: int, num_done: int) -> None:
        self._num_rows, self._random_seed = num_rows, random_seed
        self._first, self._num_done = epoch, num_done
        self._epoch = epoch

    def __len__(self) -> int:
        return self._num_rows

    def set_epoch(self, epoch: int) -> None:
        """Go on with another epoch; Lightning says so at the start of each."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng([self._random_seed, self._epoch])
        num_done = self._num_done if self._epoch == self._first else 0
        return iter(rng.permutation(self._num_rows)[num_done:].tolist())


class NaicsData(LightningDataModule):
    """The rows of a stage, in a new order each epoch.

    Args:
        tree: of all codes.
        table: token ids.
        rows: numbers of the codes to train on.
        stage: of the curriculum.
        settings: of steps.
    """

    def __init__(
        self,
        tree: Tree,
        table: Mapping[str, Tensor],
        rows: Sequence[int],
        stage: Stage,
        settings: StepSettings,
    ) -> None:
        super().__init__()
        self.stage, self.settings = stage, settings
        sampler = PairSampler(tree, rows, stage)
        self.make_step = StepMaker(tree, table, sampler, stage, settings)
        self.pairs = sampler.pairs(settings.random_seed)
        self._epoch, self._num_steps = 0, 0

    def begin_at(self, epoch: int, num_steps: int) -> None:
        """Begin where an earlier run has left off: in an epoch, after so many steps of it."""
        self._epoch, self._num_steps = epoch, num_steps

    def train_dataloader(self) -> Any:
        """Return full steps alone: a loss over a set knows no smaller one."""
        settings = self.settings
        batch_size = min(settings.batch_size, len(self.pairs))
        return DataLoader(
            _Pairs(self.pairs),
            batch_size=batch_size,
            sampler=RowOrder(
                len(self.pairs),
                settings.random_seed,
                epoch=self._epoch,
                num_done=self._num_steps * batch_size,
            ),
            # Iterating draws a seed for workers: from here, so that torch's generator is not moved.
            generator=torch.Generator().manual_seed(settings.random_seed),
            drop_last=True,
            num_workers=settings.num_workers,
            collate_fn=self.make_step,
        )
