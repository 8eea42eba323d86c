"""The page of a tracing lists triples of one row together, and others each by itself."""

import pytest

from memfit_workloads.conve.tracin.findings import Finding, Findings, Influence, NamedTriple
from memfit_workloads.conve.tracin.labels import Part
from memfit_workloads.conve.tracin.writing import page_of

ABOUT = {
    "checkpoints": [{"epoch": 2}],
    "num_train": 30,
    "num_test": 1,
    "loss_in_words": "the loss",
    "train": "train.txt",
}


def triple(index: int, *names: str) -> NamedTriple:
    parts = [Part(name=name, label=name) for name in names]
    return NamedTriple(index=index, head=parts[0], relation=parts[1], tail=parts[2])


def page_with(influences: list[Influence]) -> str:
    pytest.importorskip("jinja2", reason="pages need the html extra")
    finding = Finding(test=triple(0, "a", "knows", "b"), influences=influences)
    return page_of(Findings(about=ABOUT, by_test=[finding], own=()))


def influence(index: int, tail: str, score: float, head: str = "a") -> Influence:
    return Influence(train=triple(index, head, "knows", tail), score=score, self_influence=1.0)


def test_triples_of_one_row_are_listed_together() -> None:
    same = [influence(index, f"t{index}", 0.5) for index in range(12)]
    page = page_with([*same, influence(20, "u", 0.25), influence(21, "v", 0.125)])
    assert "a — knows → t0, t1, t2, t3, t4, t5, t6, t7, t8 and 3 more" in page
    assert page.count("+0.5<") == 1
    assert "a — knows → u<" in page
    assert "a — knows → v<" in page


def test_triples_of_other_heads_are_listed_by_themselves_though_scores_are_equal() -> None:
    page = page_with([influence(0, "t", 0.5), influence(1, "t", 0.5, head="c")])
    assert "a — knows → t<" in page
    assert "c — knows → t<" in page
