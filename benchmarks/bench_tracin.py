"""Influence of training triples: peaks by number of triples, and time beside captum and a loop.

Run: python benchmarks/bench_tracin.py [peaks] [time] [equal]   (about ten minutes on two cores)
Parts that are not named keep their figures. captum is a development tool; without it there is no
figure of it.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from paired_timing import take_turns
from results_file import RESULTS, load_result, save_result
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from memfit import influence
from memfit.observe.allocator_events import AllocatorWatch
from memfit_workloads.conve.data import read_graph
from memfit_workloads.conve.model import ConvE, build_model
from memfit_workloads.conve.queries import Queries
from memfit_workloads.conve.settings import K_VS_ALL, dataset_files
from memfit_workloads.conve.sizes import ConvESizes
from memfit_workloads.conve.tracin.losses import TripleLoss, Triples

_SMOOTHING = 0.1
_NUM_TEST, _CHUNK, _TOP_K = 64, 128, 10
_TABLE = "entity_embedding.weight"
_PEAKS: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (2000, 1000, ()),
    (2000, 10_000, ()),
    (2000, 100_000, ()),
    (20_000, 10_000, (_TABLE,)),
    (200_000, 10_000, (_TABLE,)),
    (200_000, 10_000, ()),
)
"""Entities, training triples, and what the proof leaves out."""
_TIMED_TRAIN, _TIMED_TEST, _ROUNDS = 512, 32, 3
_TWO_LAYERS = ("encoder.0.2", "encoder.1.1")
"""The convolution and the projection."""
_EQUAL_TRAIN, _EQUAL_TEST = 64, 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model, and triples to compare."""

    model: ConvE
    train: influence.Samples
    test: influence.Samples

    def scan(self, **settings: Any) -> influence.Scan:
        """Return a scan of the loss of whole rows."""
        loss = TripleLoss(loss="training", triple_loss="row", label_smoothing=_SMOOTHING)
        return influence.Scan(
            model=self.model, loss=loss, train=self.train, test=self.test, **settings
        )

    def tensors(self, samples: influence.Samples) -> tuple[Tensor, Tensor, Tensor]:
        """Return triples as heads, relations and positives."""
        batch = samples.batch(torch.arange(samples.count))
        return batch.heads[:, 0], batch.relations[:, 0], batch.positives[0]


def main(argv: Sequence[str]) -> None:
    """Measure the parts that are named, or all of them."""
    parts: dict[str, Callable[[], Any]] = {"peaks": _peaks, "time": _time, "equal": _equal}
    figures: dict[str, Any] = {}
    if (RESULTS / "tracin.json").exists():
        figures = {name: each for name, each in load_result("tracin").items() if name in parts}
    for name in argv or parts:
        figures[name] = parts[name]()
        save_result("tracin", figures)


def _peaks() -> list[dict[str, Any]]:
    """Measure the peak of scans over more and more triples, and over ten times the entities."""
    return [_peak(*sizes) for sizes in _PEAKS]


def _peak(num_entities: int, num_train: int, unproved: Sequence[str]) -> dict[str, Any]:
    sizes = ConvESizes(
        num_entities=num_entities,
        num_relations=16,
        embedding_dim=32,
        embedding_height=4,
        embedding_width=8,
        output_channels=16,
    )
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randperm(num_entities * 16, generator=draw)[: num_train // 4]
    tails = torch.randint(0, num_entities, (len(pairs), 4), generator=draw)
    parts = torch.stack([pairs // 16, pairs % 16], dim=1).repeat_interleave(4, dim=0)
    case = _case(build_model(sizes, 0), torch.cat([parts, tails.view(-1, 1)], dim=1), _NUM_TEST)
    chunks = {"train_chunk": _CHUNK, "test_chunk": _CHUNK}
    scan = case.scan(top_k=_TOP_K, unproved=unproved, **chunks)
    predicted = scan.predict()
    weights = [*case.model.parameters(), *case.model.buffers()]
    own_bytes = sum(each.nbytes for each in weights)
    with AllocatorWatch() as watch:
        scan.scores()
    measured_bytes = own_bytes + watch.highest_growth_bytes()
    return {
        "num_entities": num_entities,
        "num_train": num_train,
        "weight_bytes": own_bytes,
        "measured_peak_bytes": measured_bytes,
        "predicted_peak_bytes": predicted.peak_allocated_bytes,
        "error_fraction": predicted.peak_allocated_bytes / measured_bytes - 1,
        "beyond_weights_bytes": measured_bytes - own_bytes,
        "unproved": list(unproved),
        "is_the_proof": predicted.proof.peak_allocated_bytes > predicted.step.peak_allocated_bytes,
    }


def _time() -> dict[str, Any]:
    """Time scores by factors, by a loop of backward passes, and by captum, in turns."""
    case = _dataset_case("umls", _TIMED_TRAIN, _TIMED_TEST)
    found: dict[str, Any] = {}
    ways: dict[str, Callable[[], Any]] = {
        "factors": lambda: case.scan().scores().scores,
        "loop": lambda: _loop(case),
        "factors of two layers": lambda: case.scan(parameters=_TWO_LAYERS).scores().scores,
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, of_two = (
            _captum_of(case, Path(folder), layers=each) for each in (None, _TWO_LAYERS)
        )
        if whole is not None and of_two is not None:
            ways |= {"captum": whole, "captum of two layers": of_two}

        def block(name: str) -> Callable[[int], object]:
            return lambda _: found.update({name: ways[name]()})

        for name in ("factors", "factors of two layers"):  # what is compiled once is compiled
            ways[name]()
        turns = list(take_turns([block(name) for name in ways], range(_ROUNDS)))
    by_name = {name: [turn[place] for turn in turns] for place, name in enumerate(ways)}
    beside = {name: "factors of two layers" if "two" in name else "factors" for name in ways}
    return {
        "num_train": _TIMED_TRAIN,
        "num_test": _TIMED_TEST,
        "num_weights": sum(each.numel() for each in case.model.parameters()),
        "rounds": _ROUNDS,
        "seconds": {name: statistics.median(each) for name, each in by_name.items()},
        "times_faster": {
            name: statistics.median(
                theirs / own for theirs, own in zip(each, by_name[beside[name]], strict=True)
            )
            for name, each in by_name.items()
        },
        "differences": {name: _difference(found[beside[name]], found[name]) for name in ways},
    }


def _equal() -> list[dict[str, Any]]:
    """Compare scores with captum's in double precision."""
    rows = []
    for name in ("umls", "kinships"):
        case = _dataset_case(name, _EQUAL_TRAIN, _EQUAL_TEST)
        case.model.double()
        found = case.scan().scores().scores
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by_captum = _captum_of(case, Path(folder))
            theirs = None if by_captum is None else by_captum()
        rows.append(
            {
                "dataset": name,
                "num_train": _EQUAL_TRAIN,
                "num_test": _EQUAL_TEST,
                "loop_difference": _difference(found, _loop(case)),
                "captum_difference": None if theirs is None else _difference(found, theirs),
            }
        )
    return rows


def _dataset_case(name: str, num_train: int, num_test: int) -> Case:
    """Take triples of a graph that comes with memfit, and ConvE of its usual size."""
    graph = read_graph(dataset_files(name))
    sizes = ConvESizes(num_entities=graph.num_entities, num_relations=graph.num_relations)
    model = build_model(sizes, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        model.entity_bias.normal_(0.0, 0.1)
        for key, each in model.named_buffers():
            if key.endswith("running_mean"):
                each.normal_(0.0, 0.1)
    return _case(model, graph.train, num_test, num_train=num_train)


def _case(model: ConvE, triples: Tensor, num_test: int, num_train: int | None = None) -> Case:
    known = Queries.grouped(triples, model.sizes.num_relations)

    def samples(some: Tensor) -> influence.Samples:
        kept = Triples(triples=some, known=known, sides="tail", training_target=K_VS_ALL)
        return kept.samples()

    return Case(model=model, train=samples(triples[:num_train]), test=samples(triples[-num_test:]))


class _RowLosses(nn.Module):
    """The loss of rows against all entities, from a matrix of scores, as captum takes it."""

    def __init__(self, reduction: str = "none") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, scores: Tensor, positives: Tensor) -> Tensor:
        """Return the losses (B,), or their sum."""
        num_entities = scores.shape[1]
        listed = scores.new_zeros(len(scores), num_entities + 1)
        label = listed.scatter_(1, positives + 1, 1.0)[:, 1:]
        label = (1 - _SMOOTHING) * label + _SMOOTHING / num_entities
        losses = F.binary_cross_entropy_with_logits(scores, label, reduction="none")
        losses = losses.mean(dim=1)
        return losses.sum() if self.reduction == "sum" else losses


def _loop(case: Case) -> Any:
    """Make the gradient of each training triple by a backward pass, and compare it with all."""
    case.model.eval()
    parameters = list(case.model.parameters())
    loss = _RowLosses()

    def gradients(samples: influence.Samples) -> Iterator[Tensor]:
        for head, relation, positives in zip(*case.tensors(samples), strict=True):
            scores = case.model(head[None], relation[None])
            found = torch.autograd.grad(loss(scores, positives[None]).sum(), parameters)
            yield torch.cat([each.flatten() for each in found])

    held = torch.stack(list(gradients(case.test)))
    return torch.stack([held @ each for each in gradients(case.train)], dim=1).numpy()


def _captum_of(
    case: Case, folder: Path, *, layers: Sequence[str] | None = None
) -> Callable[[], Any] | None:
    """Return what computes the scores with captum; None where it is not installed.

    For some layers it is the mode that does not loop over samples.
    """
    if importlib.util.find_spec("captum") is None:
        return None
    captum_influence = importlib.import_module("captum.influence")
    file = folder / "0.pt"
    torch.save(case.model.state_dict(), file)

    def load(model: nn.Module, path: str) -> float:
        model.load_state_dict(torch.load(path))
        model.eval()
        return 1.0

    theirs = captum_influence.TracInCP(
        case.model,
        TensorDataset(*case.tensors(case.train)),
        [str(file)],
        checkpoints_load_func=load,
        loss_fn=_RowLosses("none" if layers is None else "sum"),
        layers=None if layers is None else list(layers),
        sample_wise_grads_per_batch=layers is not None,
        batch_size=32,
    )
    return lambda: theirs.influence(case.tensors(case.test)).detach().numpy()


def _difference(found: Any, other: Any) -> float:
    return float(np.abs(found - other).max() / np.abs(found).max())


if __name__ == "__main__":
    main(sys.argv[1:])
