"""Ranks are filtered, fair to ties, and never made from scores that are no numbers."""

import pytest
import torch
from torch import Tensor, nn

from memfit.errors import MemfitError
from memfit.units import MIB
from memfit_workloads.conve.data import Graph
from memfit_workloads.conve.evaluation import (
    Evaluation,
    evaluation_batch_size,
    metrics_of,
    ranks_of,
)
from memfit_workloads.conve.model import ConvE, build_model
from memfit_workloads.conve.sizes import ConvESizes

NUM_ENTITIES, NUM_RELATIONS = 12, 2
SIZES = ConvESizes(
    num_entities=NUM_ENTITIES,
    num_relations=NUM_RELATIONS,
    embedding_dim=24,
    embedding_height=4,
    embedding_width=6,
    output_channels=3,
)


@pytest.fixture
def graph() -> Graph:
    generator = torch.Generator().manual_seed(3)
    limits = (NUM_ENTITIES, NUM_RELATIONS, NUM_ENTITIES)
    triples = torch.stack([torch.randint(n, (90,), generator=generator) for n in limits], dim=1)
    triples = torch.unique(triples, dim=0)[torch.randperm(75, generator=generator)]
    return Graph(
        train=triples[:45],
        valid=triples[45:60],
        test=triples[60:75],
        entity_ids={f"e{i}": i for i in range(NUM_ENTITIES)},
        relation_ids={f"r{i}": i for i in range(NUM_RELATIONS)},
        num_entities=NUM_ENTITIES,
        num_relations=NUM_RELATIONS,
        num_bad_lines=0,
    )


@pytest.fixture
def model() -> ConvE:
    return build_model(SIZES, seed=0)


def rank_by_definition(scores: Tensor, target: int, known: set[int]) -> float:
    """Rank one target with a plain loop over entities."""
    higher = equal = 0
    for entity, score in enumerate(scores.tolist()):
        if entity != target and entity not in known:
            higher += score > scores[target].item()
            equal += score == scores[target].item()
    return 1 + higher + equal / 2


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_ranks_equal_the_definition_on_both_sides_with_all_known_triples_filtered(
    graph: Graph, model: ConvE, batch_size: int
) -> None:
    model.eval()
    everything = torch.cat([graph.train, graph.valid, graph.test]).tolist()
    expected: dict[str, list[float]] = {"tail": [], "head": []}
    for head, relation, tail in graph.test.tolist():
        with torch.no_grad():
            tails = model(torch.tensor([head]), torch.tensor([relation]))[0]
            heads = model(torch.tensor([tail]), torch.tensor([relation + NUM_RELATIONS]))[0]
        known_tails = {t for h, r, t in everything if (h, r) == (head, relation)}
        known_heads = {h for h, r, t in everything if (r, t) == (relation, tail)}
        expected["tail"].append(rank_by_definition(tails, tail, known_tails))
        expected["head"].append(rank_by_definition(heads, head, known_heads))
    evaluation = Evaluation.of(graph, SIZES)
    evaluation = Evaluation(graph=graph, known=evaluation.known, batch_size=batch_size)
    found = evaluation.metrics(model, graph.test)
    for side, ranks in expected.items():
        assert found[side] == pytest.approx(metrics_of(torch.tensor(ranks).double()))
    both = torch.tensor(expected["tail"] + expected["head"]).double()
    assert found["both"] == pytest.approx(metrics_of(both))


def test_known_test_triples_do_not_compete_with_each_other(graph: Graph) -> None:
    head, relation, tail = graph.test[0].tolist()
    rival = next(e for e in range(NUM_ENTITIES) if e != tail)
    test = torch.cat([graph.test, torch.tensor([[head, relation, rival]])])
    with_rival = Graph(**{name: getattr(graph, name) for name in Graph.__slots__} | {"test": test})

    class FavoursRival(nn.Module):
        entity_bias = torch.zeros(())

        def forward(self, heads: Tensor, relations: Tensor) -> Tensor:
            scores = torch.zeros(len(heads), NUM_ENTITIES)
            scores[:, tail], scores[:, rival] = 1.0, 2.0
            return scores

    evaluation = Evaluation.of(with_rival, SIZES)
    found = evaluation.metrics(FavoursRival(), torch.tensor([[head, relation, tail]]))  # type: ignore[arg-type]
    assert found["tail"]["mr"] == 1.0


def test_ties_give_the_mean_of_the_ranks_that_they_could_have() -> None:
    scores = torch.zeros(1, 9)
    rank = ranks_of(scores, torch.tensor([4]), (torch.tensor([0]), torch.tensor([4])))
    assert rank.tolist() == [5.0]


def test_a_known_answer_that_ties_with_the_target_does_not_count() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0]])
    known = (torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert ranks_of(scores, torch.tensor([0]), known).tolist() == [1.0]


def test_metrics_of_known_ranks() -> None:
    found = metrics_of(torch.tensor([1.0, 2.0, 4.0, 20.0]).double())
    assert found == pytest.approx(
        {"mr": 6.75, "mrr": 0.45, "hits_at_1": 0.25, "hits_at_3": 0.5, "hits_at_10": 0.75}
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_raise_and_name_the_triple(
    graph: Graph, model: ConvE, value: float
) -> None:
    head, relation, tail = graph.test[2].tolist()
    with torch.no_grad():
        model.entity_bias[5] = value
    with pytest.raises(MemfitError, match=r"scores the triple \(e\d+, r\d, e\d+\)"):
        Evaluation.of(graph, SIZES).metrics(model, graph.test)
    name = rf"\(e{head}, r{relation}, e{tail}\)"
    with pytest.raises(MemfitError, match=name):
        Evaluation.of(graph, SIZES).metrics(model, graph.test[2:3])


def test_the_mode_of_the_model_is_put_back_also_after_an_error(graph: Graph, model: ConvE) -> None:
    evaluation = Evaluation.of(graph, SIZES)
    evaluation.metrics(model, graph.valid)
    assert model.training
    model.entity_bias.data.fill_(float("nan"))
    with pytest.raises(MemfitError):
        evaluation.metrics(model, graph.valid)
    assert model.training
    assert torch.is_grad_enabled()


def test_the_evaluation_batch_follows_the_memory_there_is() -> None:
    large = ConvESizes(num_entities=1_000_000, num_relations=5)
    assert evaluation_batch_size(large) * 10 * large.num_entities <= 64 * MIB
    assert evaluation_batch_size(large, free_bytes=1) == 1
    assert evaluation_batch_size(SIZES) > evaluation_batch_size(SIZES, free_bytes=100_000) > 1
