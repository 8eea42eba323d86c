"""Finding wrong triples of UMLS by self-influence, beside finding them by their loss.

A tenth of the training triples get a tail that the relation has elsewhere and that makes no known
triple. ConvE is trained on them for a few epochs; then a tenth is removed, and it is trained anew.

Run: python benchmarks/bench_mislabelled.py [SEED ...]     (about two minutes a seed)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from results_file import RESULTS, load_result, save_result
from torch import Tensor

from memfit import influence
from memfit.losses import one_to_many_bce
from memfit_workloads.conve.batches import QueryBatches
from memfit_workloads.conve.data import Graph, read_graph
from memfit_workloads.conve.evaluation import Evaluation
from memfit_workloads.conve.model import ConvE, build_model
from memfit_workloads.conve.queries import Queries
from memfit_workloads.conve.settings import K_VS_ALL, dataset_files
from memfit_workloads.conve.sizes import ConvESizes
from memfit_workloads.conve.tracin.losses import TripleLoss, Triples

SEEDS = (0, 1, 2)
_FRACTION = 0.1
_EPOCHS, _CHECKPOINTS = 30, (20, 25, 30)
_CHOSEN_ON = (7, 8)
"""Seeds on which epochs and checkpoints were chosen; none of those that are reported."""
_RATE, _DECAY, _BATCH, _SMOOTHING = 0.005, 0.95, 128, 0.1
_DEFINITIONS = {
    "target": ("target", "target"),
    "own part": ("training", "target"),
    "row": ("training", "row"),
}
_CHOSEN = "target"
"""What the triples that are removed are chosen by; fixed before anything was measured."""

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A model with its checkpoints."""

    model: ConvE
    states: list[tuple[float, State]]
    """Learning rate and weights."""
    valid_mrr: float


def main(argv: Sequence[str]) -> None:
    """Measure the seeds that are named, or all of them, and keep the others' figures."""
    rows: dict[int, dict[str, Any]] = {}
    if (RESULTS / "mislabelled.json").exists():
        rows = {row["seed"]: row for row in load_result("mislabelled")["rows"]}
    for seed in [int(word) for word in argv] or SEEDS:
        rows[seed] = _measured(seed)
        save_result(
            "mislabelled",
            {
                "corrupted_fraction": _FRACTION,
                "epochs": _EPOCHS,
                "checkpoints": list(_CHECKPOINTS),
                "seeds_chosen_on": list(_CHOSEN_ON),
                "chosen_by": _CHOSEN,
                "rows": [rows[each] for each in sorted(rows)],
            },
        )
        print(rows[seed])


def _measured(seed: int) -> dict[str, Any]:
    clean = read_graph(dataset_files("umls"))
    train, is_wrong = corrupted(clean, seed)
    graph = replace(clean, train=train)
    began = time.process_time()
    trained = _train(graph, clean, seed)
    train_seconds = time.process_time() - began
    own = {name: _self_influence(trained, graph, *each) for name, each in _DEFINITIONS.items()}
    losses, last_losses = _losses(trained, graph)
    number = int(is_wrong.sum())
    draw = torch.Generator().manual_seed(1000 + seed)
    removed = {
        "self-influence": own[_CHOSEN].topk(number).indices,
        "loss": losses.topk(number).indices,
        "last loss": last_losses.topk(number).indices,
        "random": torch.randperm(len(train), generator=draw)[:number],
        "the wrong ones": is_wrong.nonzero()[:, 0],
    }
    after = {}
    for name, rows in removed.items():
        kept = torch.ones(len(train), dtype=torch.bool)
        kept[rows] = False
        after[name] = _train(replace(graph, train=train[kept]), clean, seed).valid_mrr
    return {
        "seed": seed,
        "num_train": len(train),
        "num_wrong": number,
        "train_seconds": train_seconds,
        "self_influence_auroc": {name: auroc(each, is_wrong) for name, each in own.items()},
        "loss_auroc": auroc(losses, is_wrong),
        "last_loss_auroc": auroc(last_losses, is_wrong),
        "valid_mrr": {"nothing": trained.valid_mrr, **after},
    }


def corrupted(graph: Graph, seed: int) -> tuple[Tensor, Tensor]:
    """Return training triples with wrong tails among them, and which these are."""
    draw = torch.Generator().manual_seed(seed)
    known = {
        tuple(each) for part in (graph.train, graph.valid, graph.test) for each in part.tolist()
    }
    train = graph.train.clone()
    is_wrong = torch.zeros(len(train), dtype=torch.bool)
    for row in torch.randperm(len(train), generator=draw).tolist():
        if int(is_wrong.sum()) == int(_FRACTION * len(train)):
            break
        head, relation, _ = train[row].tolist()
        fitting = graph.train[graph.train[:, 1] == relation, 2].unique().tolist()
        free = [tail for tail in fitting if (head, relation, tail) not in known]
        if free:
            tail = free[int(torch.randint(len(free), (1,), generator=draw))]
            known.add((head, relation, tail))
            train[row, 2] = tail
            is_wrong[row] = True
    return train, is_wrong


def _train(graph: Graph, clean: Graph, seed: int) -> Trained:
    """Train on a graph, and rank validation triples as the clean one filters them."""
    sizes = ConvESizes(
        num_entities=graph.num_entities,
        num_relations=graph.num_relations,
        output_channels=16,
        input_dropout=0.1,
        feature_map_dropout=0.1,
        output_dropout=0.2,
    )
    model = build_model(sizes, seed)
    queries = Queries.grouped(graph.train, graph.num_relations)
    batches = QueryBatches.of(queries, _BATCH, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    states = []
    for epoch in range(1, _EPOCHS + 1):
        rate = _RATE * _DECAY ** (epoch - 1)
        optimizer.param_groups[0]["lr"] = rate
        for rows in batches.cut(torch.randperm(len(queries), generator=draw)):
            batch = batches.batch(rows)
            loss = one_to_many_bce(
                model.encode(batch.heads, batch.relations),
                model.entity_embedding.weight,
                model.entity_bias,
                batch.positives,
                label_smoothing=_SMOOTHING,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch in _CHECKPOINTS:
            states.append((rate, {name: each.clone() for name, each in model.state_dict().items()}))
    valid = Evaluation.of(clean, sizes).metrics(model, clean.valid)
    return Trained(model=model, states=states, valid_mrr=valid["both"]["mrr"])


def _triples(graph: Graph) -> influence.Samples:
    known = Queries.grouped(graph.train, graph.num_relations)
    kept = Triples(triples=graph.train, known=known, sides="both", training_target=K_VS_ALL)
    return kept.samples()


def _self_influence(trained: Trained, graph: Graph, loss: str, triple_loss: str) -> Tensor:
    def checkpoint(place: int) -> influence.Checkpoint:
        rate, state = trained.states[place]
        return influence.Checkpoint(name=str(place), load=lambda: state, learning_rate=rate)

    found = influence.self_influence(
        trained.model,
        TripleLoss(loss=loss, triple_loss=triple_loss, label_smoothing=_SMOOTHING),
        _triples(graph),
        checkpoints=[checkpoint(place) for place in range(len(trained.states))],
    )
    return torch.from_numpy(found.scores)


def _losses(trained: Trained, graph: Graph) -> tuple[Tensor, Tensor]:
    """Return the losses of triples' own scores, the mean over checkpoints and the last ones."""
    samples = _triples(graph)
    loss = TripleLoss(loss="target", triple_loss="target", label_smoothing=_SMOOTHING)
    found = []
    trained.model.eval()
    for _, state in trained.states:
        trained.model.load_state_dict(state)
        with torch.no_grad():
            parts = [
                loss(trained.model, samples.batch(torch.arange(rows.start, rows.stop)))
                for rows in samples.chunks(512)
            ]
        found.append(torch.cat(parts).double())
    return torch.stack(found).mean(dim=0), found[-1]


def auroc(scores: Tensor, is_wrong: Tensor) -> float:
    """Return how often a wrong triple has a higher score than a right one, ties half."""
    wrong, right = scores[is_wrong], scores[~is_wrong].sort().values
    below = torch.searchsorted(right, wrong).double()
    not_above = torch.searchsorted(right, wrong, right=True).double()
    return float(((below + not_above) / 2).mean() / len(right))


if __name__ == "__main__":
    main(sys.argv[1:])
