"""Reading graphs and grouping queries: every line is accounted for, every answer is kept."""

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from memfit.errors import DataError
from memfit.losses import PositivePairs
from memfit_workloads.conve import batches as batches_module
from memfit_workloads.conve.batches import QueryBatches, batch_rows
from memfit_workloads.conve.data import Graph, read_graph
from memfit_workloads.conve.queries import Queries, with_inverses
from memfit_workloads.conve.settings import GraphFiles

GOOD = "a\tlikes\tb\na\tlikes\tc\nb\tknows\tc\n"
DATASETS = Path(__file__).parents[2] / "src/memfit_workloads/conve/datasets"


def graph_files(folder: Path, train: str = GOOD, **maps: str) -> GraphFiles:
    """Write a graph's files; valid and test are the first line of the good training file."""
    for name, text in {"train": train, "valid": GOOD[:10], "test": GOOD[:10], **maps}.items():
        (folder / f"{name}.txt").write_text(text)
    return GraphFiles(
        train=folder / "train.txt",
        valid=folder / "valid.txt",
        test=folder / "test.txt",
        entity_to_id=folder / "entities.txt" if "entities" in maps else None,
        relation_to_id=folder / "relations.txt" if "relations" in maps else None,
    )


def read(folder: Path, train: str = GOOD, *, skip_bad_lines: bool = False, **maps: str) -> Graph:
    return read_graph(graph_files(folder, train, **maps), skip_bad_lines=skip_bad_lines)


def test_names_are_numbered_in_the_order_in_which_they_appear(tmp_path: Path) -> None:
    graph = read(tmp_path)
    assert graph.entity_ids == {"a": 0, "b": 1, "c": 2}
    assert graph.relation_ids == {"likes": 0, "knows": 1}
    assert graph.train.tolist() == [[0, 0, 1], [0, 0, 2], [1, 1, 2]]


def test_a_file_with_other_line_ends_and_a_byte_order_mark_reads_the_same(tmp_path: Path) -> None:
    files = graph_files(tmp_path)
    files.train.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode() + b"\r\n")
    assert read_graph(files).entity_ids == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    "line", ["a likes b", "a\tlikes", "a\tlikes\tb\tmore", "a\t\tb", "\tlikes\tb"]
)
def test_a_malformed_line_is_named_with_its_file_and_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(DataError, match=r"train\.txt, line 4: found .*--skip-bad-lines"):
        read(tmp_path, GOOD + line + "\n")


def test_malformed_lines_are_counted_when_they_are_to_be_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = read(tmp_path, "broken\n" + GOOD + "a\tb\n", skip_bad_lines=True)
    assert graph.num_bad_lines == 2
    assert len(graph.train) == 3
    assert "line 1" in caplog.text
    assert "line 5" in caplog.text


@pytest.mark.parametrize(
    ("entities", "what"),
    [
        ("a\t0\nb\t1\n", "the entity 'c' is not in"),
        ("a\t0\nb\t1\nc\t1\n", "the id 1 is already used in line 2"),
        ("a\t0\nb\t1\na\t2\n", "the entity 'a' is already listed"),
        ("a\t0\nb\tone\n", "needed entity name TAB id"),
        ("a\t0\nb\t-1\n", "needed entity name TAB id"),
        ("a\n", "needed entity name TAB id"),
        ("", "it lists no entity"),
    ],
)
def test_an_unusable_map_of_entities_is_an_error(tmp_path: Path, entities: str, what: str) -> None:
    with pytest.raises(DataError, match=what):
        read(tmp_path, entities=entities)


def test_unknown_names_are_counted_when_they_are_to_be_skipped(tmp_path: Path) -> None:
    graph = read(tmp_path, entities="a\t0\nb\t1\n", skip_bad_lines=True)
    assert graph.train.tolist() == [[0, 0, 1]]
    assert graph.num_bad_lines == 2


def test_ids_with_gaps_count_to_the_largest_id(tmp_path: Path) -> None:
    graph = read(tmp_path, entities="a\t0\nb\t7\nc\t3\n", relations="likes\t4\nknows\t0\n")
    assert graph.num_entities == 8
    assert graph.num_relations == 5
    assert graph.train[0].tolist() == [0, 4, 7]


def test_a_file_that_is_missing_or_empty_or_no_text_is_an_error(tmp_path: Path) -> None:
    files = graph_files(tmp_path)
    files.test.write_text("\n")
    with pytest.raises(DataError, match=r"test\.txt: it has no triples"):
        read_graph(files)
    files.test.write_bytes(b"a\tlikes\t\xff\n")
    with pytest.raises(DataError, match=r"test\.txt: it is no UTF-8"):
        read_graph(files)
    files.test.unlink()
    with pytest.raises(DataError, match=r"test\.txt: it cannot be read"):
        read_graph(files)


@pytest.mark.parametrize(
    ("name", "entities", "relations", "triples"),
    [
        ("nations", 14, 55, (1592, 199, 201)),
        ("umls", 135, 46, (5216, 652, 661)),
        ("kinships", 104, 25, (8544, 1068, 1074)),
    ],
)
def test_the_shipped_graphs_are_complete(
    name: str, entities: int, relations: int, triples: tuple[int, int, int]
) -> None:
    paths = (DATASETS / name / f"{part}.txt" for part in ("train", "valid", "test"))
    train, valid, test = paths
    graph = read_graph(GraphFiles(train=train, valid=valid, test=test))
    assert (graph.num_entities, graph.num_relations) == (entities, relations)
    assert (len(graph.train), len(graph.valid), len(graph.test)) == triples


def random_triples(num_triples: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randint(n, (num_triples,), generator=generator) for n in (12, 3, 12)]
    return torch.stack(columns, dim=1)


def test_every_query_has_all_its_tails_once_inverses_included() -> None:
    triples = random_triples()
    queries = Queries.grouped(triples, num_relations=3)
    expected: dict[tuple[int, int], set[int]] = {}
    for head, relation, tail in with_inverses(triples, 3).tolist():
        expected.setdefault((head, relation), set()).add(tail)
    batch = QueryBatches.of(queries, 8, seed=1).batch(torch.arange(len(queries)))
    found = {}
    for head, relation, row in zip(*(part.tolist() for part in batch), strict=True):
        answers = [tail for tail in row if tail >= 0]
        assert len(answers) == len(set(answers))
        found[head, relation] = set(answers)
    assert found == expected


def test_a_batch_is_padded_to_its_own_longest_row_and_the_largest_to_the_longest_of_all() -> None:
    queries = Queries.grouped(random_triples(), num_relations=3)
    counts = queries.offsets.diff()
    rows = counts.argsort()[:5]
    batches = QueryBatches.of(queries, 500, seed=1)
    found = batches.batch(rows).positives
    assert isinstance(found, torch.Tensor)
    assert found.shape == (5, int(counts[rows].max()))
    largest = batches.largest(500)
    assert isinstance(largest.positives, torch.Tensor)
    assert largest.positives.shape == (500, int(counts.max()))
    assert largest.heads.shape == largest.relations.shape == (500,)


def long_tailed_queries() -> Queries:
    """Make queries of which a few have very many answers."""
    generator = torch.Generator().manual_seed(2)
    heads = torch.arange(400)
    counts = torch.where(heads % 40 == 0, 150, 2)
    triples = torch.stack(
        [
            heads.repeat_interleave(counts),
            torch.zeros(int(counts.sum()), dtype=torch.int64),
            torch.cat([torch.randperm(400, generator=generator)[: int(n)] for n in counts]),
        ],
        dim=1,
    )
    return Queries.grouped(triples, num_relations=1)


@pytest.mark.slow
def test_batches_of_pairs_list_every_answer_and_are_all_of_one_size(monkeypatch) -> None:
    monkeypatch.setattr(batches_module, "_MOST_PADDED_BYTES", 0)
    queries = long_tailed_queries()
    batches = QueryBatches.of(queries, 20, seed=5)
    order = torch.Generator().manual_seed(5)
    for _ in range(30):
        cut = batches.cut(torch.randperm(len(queries), generator=order))
        assert torch.equal(torch.cat(cut).sort().values, torch.arange(len(queries)))
        for rows in cut:
            made = batches.batch(rows)
            assert isinstance(made.positives, PositivePairs)
            assert len(made.positives.rows) == batches.num_pairs
            is_pair = made.positives.candidates >= 0
            found = torch.stack(made.positives, dim=1)[is_pair].tolist()
            expected = [
                [place, tail]
                for place, row in enumerate(queries.padded_answers(rows).tolist())
                for tail in row
                if tail >= 0
            ]
            assert sorted(found) == sorted(expected)
    largest = batches.largest(20)
    assert [part.shape for part in tree_leaves(largest)] == [
        part.shape for part in tree_leaves(batches.batch(cut[0]))
    ]


def test_the_first_epoch_is_cut_as_its_order_says(monkeypatch) -> None:
    monkeypatch.setattr(batches_module, "_MOST_PADDED_BYTES", 0)
    queries = long_tailed_queries()
    batches = QueryBatches.of(queries, 20, seed=5)
    order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat(batches.cut(order)), order)


def test_ids_too_large_for_one_number_are_grouped_all_the_same() -> None:
    triples = random_triples()
    large = triples + torch.tensor([2**40, 0, 2**40])
    queries, expected = Queries.grouped(large, 3), Queries.grouped(triples, 3)
    assert torch.equal(queries.tails, expected.tails + 2**40)
    every = torch.arange(len(queries))
    heads, relations = queries.pairs(every)
    assert torch.equal(heads, expected.pairs(every)[0] + 2**40)
    assert torch.equal(relations, expected.pairs(every)[1])
    assert torch.equal(queries.offsets, expected.offsets)


def test_single_targets_make_every_triple_and_its_inverse_a_row() -> None:
    triples = random_triples(20)
    queries = Queries.one_per_triple(triples, num_relations=3)
    batch = QueryBatches.of(queries, 40, seed=1).batch(torch.arange(40))
    assert isinstance(batch.positives, torch.Tensor)
    assert batch.positives.shape == (40, 1)
    rows = torch.cat([batch.heads[:, None], batch.relations[:, None], batch.positives], dim=1)
    assert torch.equal(rows, with_inverses(triples, 3))


def test_the_answers_to_queries_are_listed_row_by_row() -> None:
    triples = random_triples()
    queries = Queries.grouped(triples, num_relations=3)
    asked = with_inverses(triples, 3)[[5, 210, 7, 5]]
    rows, tails = queries.answers(asked[:, 0], asked[:, 1])
    every = with_inverses(triples, 3)
    for position in range(4):
        known = every[(every[:, :2] == asked[position, :2]).all(dim=1)][:, 2]
        assert tails[rows == position].tolist() == sorted(set(known.tolist()))


@pytest.mark.parametrize(
    ("num_rows", "last"), [(12, [4, 4, 4]), (13, [4, 4, 3, 2]), (14, [4, 4, 4, 2])]
)
def test_batches_hold_every_row_once_and_never_a_single_row(num_rows: int, last: list[int]) -> None:
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    batches = batch_rows(order, 4)
    assert torch.equal(torch.cat(batches), order)
    assert [len(batch) for batch in batches] == last
