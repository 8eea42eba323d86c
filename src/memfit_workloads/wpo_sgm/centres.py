"""Which points the kernels of a mixture stand at."""

from __future__ import annotations

import torch
from torch import Tensor

from memfit.errors import MissingExtraError, UsageError

from .settings import FIRST

_NUM_STARTS = 3


def choose_centres(train: Tensor, num_centres: int, choice: str, seed: int) -> Tensor:
    """Choose centres (K, D) among or amid training samples (N, D).

    Args:
        train: at least as many samples as centres, in random order.
        num_centres: K.
        choice: ``first``, the first samples, as the document has it; ``kmeans``, the means of K
            clusters (Lloyd 1982), which stand where new data lie, too.
        seed: of the clusters' beginnings.

    Raises:
        MissingExtraError: if clusters are wanted and scikit-learn is not installed.
    """
    if choice == FIRST:
        return train[:num_centres].clone()
    try:
        from sklearn.cluster import KMeans
    except ModuleNotFoundError:
        raise MissingExtraError("--centers kmeans", "scikit-learn", "pictures") from None
    clusters = KMeans(num_centres, n_init=_NUM_STARTS, random_state=seed).fit(train.numpy())
    return torch.from_numpy(clusters.cluster_centers_).to(train)


def centres_of_rank(centres: Tensor, rank: int, num_ranks: int) -> Tensor:
    """Return the centres that are one process's, nearly as many as everyone's.

    Raises:
        UsageError: if there are fewer centres than processes.
    """
    if len(centres) < num_ranks:
        msg = (
            f"There are {len(centres)} centres for {num_ranks} ranks; every rank needs "
            "one at least. Raise --train_kernel_size or start fewer ranks."
        )
        raise UsageError(msg)
    return centres.tensor_split(num_ranks)[rank].clone()
