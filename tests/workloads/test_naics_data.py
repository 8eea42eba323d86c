"""The NAICS tree, its texts, the curriculum, and how steps are made of them."""

import re

import numpy as np
import pytest

from memfit.errors import DataError, UsageError
from memfit_workloads.naics.card_job import job_for
from memfit_workloads.naics.config import CONF, DEFAULT, read_config, read_stages
from memfit_workloads.naics.evaluation import ndcg, retrieval_metrics, spread_metrics, tree_metrics
from memfit_workloads.naics.sampling import PairSampler, Stage
from memfit_workloads.naics.texts import CHANNELS, read_texts, split_description
from memfit_workloads.naics.tree import (
    OTHER_SECTOR,
    hold_out,
    make_tree,
    sector_of,
    subsector_of,
)

SMALL = (
    *("11", "111", "1111", "11111", "111110", "11112", "111120", "112", "1121", "11211"),
    *("31-33", "311", "3111", "321", "3211"),
)


@pytest.fixture(scope="module")
def tree():
    return make_tree(SMALL)


def distance(tree, first, second):
    return tree.distances[tree.codes.index(first), tree.codes.index(second)]


def relation(tree, first, second):
    return tree.relations[tree.codes.index(first), tree.codes.index(second)]


@pytest.mark.parametrize(
    ("first", "second", "steps", "name"),
    [
        ("11", "111", 0.5, 1),
        ("11", "1111", 1.5, 3),
        ("11", "111110", 3.5, 6),
        ("111", "112", 2.0, 2),
        ("1111", "112", 3.0, 5),
        ("1111", "1121", 4.0, 7),
        ("111110", "111120", 4.0, 7),
        ("11111", "11211", 6.0, 12),
        ("111110", "11211", 7.0, 13),
        ("31-33", "321", 0.5, 1),
        ("311", "321", 2.0, 2),
        ("111110", "3111", OTHER_SECTOR, 15),
        ("11", "31-33", OTHER_SECTOR, 15),
    ],
)
def test_distances_and_relations(tree, first, second, steps, name):
    assert distance(tree, first, second) == distance(tree, second, first) == steps
    assert relation(tree, first, second) == relation(tree, second, first) == name


def test_a_code_without_its_parent_is_refused():
    with pytest.raises(DataError, match="1111 has no 111 above it"):
        make_tree(["11", "1111"])


@pytest.mark.slow
def test_the_texts_that_ship_are_the_whole_tree_of_2022():
    texts = read_texts()
    found = make_tree(list(texts))
    assert len(found) == 2125
    assert [int((found.levels == level).sum()) for level in range(2, 7)] == [20, 96, 308, 689, 1012]
    assert all(text["title"] for text in texts.values())
    # A description that refers to another's is that one.
    assert texts["11111"]["description"] == texts["111110"]["description"] != ""
    assert sum(bool(text["examples"]) for text in texts.values()) > 390


def test_no_text_names_a_code():
    numbered = re.compile(r"(?:[Ss]ector|Industry|Industry Group|NAICS|code) \d\d")
    for code, text in read_texts().items():
        for channel in CHANNELS:
            assert not numbered.search(text[channel]), (code, text[channel])


def test_a_description_is_taken_apart():
    found = split_description(
        "Growing figs. Growing dates is classified in Industry 111339, Dates.\n\n"
        "Illustrative Examples:\n\nFig farms\nFig groves\n\nCross-References. Establishments--"
    )
    assert found == {
        "description": "Growing figs.",
        "examples": "Fig farms; Fig groves",
        "excluded": "Growing dates is classified in Industry Dates.",
    }


def test_whole_subsectors_are_held_out_and_their_sectors_stay():
    codes = list(read_texts())
    train, test = hold_out(codes, 0.2, 42)
    assert sorted(train + test) == sorted(codes)
    assert 0.2 < len(test) / len(codes) < 0.25
    assert not {subsector_of(code) for code in test} & {subsector_of(code) for code in train}
    assert {sector_of(code) for code in test} <= {
        sector_of(code) for code in train if subsector_of(code)
    }


def test_negatives_are_farther_than_the_positive_and_never_held_out(tree):
    rows = [row for row, code in enumerate(tree.codes) if code not in ("112", "1121", "11211")]
    stage = Stage(name="01", positive_relation=(1, 2), n_positives=2, n_negatives=4)
    sampler = PairSampler(tree, rows, stage)
    rng = np.random.default_rng(0)
    pairs = sampler.pairs(0)
    assert len(pairs)
    for anchor, positive in pairs:
        assert tree.relations[anchor, positive] in (1, 2)
        found = sampler.rows[sampler.negatives(anchor, positive, rng)]
        assert len(set(found)) == len(found) <= 4
        assert set(found) <= set(rows)
        assert (tree.distances[anchor, found] > tree.distances[anchor, positive]).all()


def test_near_negatives_are_likelier(tree):
    sampler = PairSampler(tree, range(len(tree)), Stage(name="05"))
    number = tree.codes.index
    anchor, positive = number("111110"), number("11111")
    weights = sampler.negative_weights(anchor, positive, sampler.rows)
    assert weights[number("111120")] > weights[number("11211")] > weights[number("311")] > 0
    assert weights[anchor] == weights[positive] == 0


def test_more_positives_make_more_rows(tree):
    few, many = (
        PairSampler(tree, range(len(tree)), Stage(name="05", n_positives=count)).pairs(0)
        for count in (1, 3)
    )
    assert len(few) == len(tree)
    assert len(few) < len(many) <= 3 * len(tree)


def test_a_stage_without_pairs_is_refused(tree):
    with pytest.raises(UsageError, match="no pair of an anchor and a positive among 15 codes"):
        PairSampler(tree, range(len(tree)), Stage(name="x", positive_level=(9,))).pairs(0)


def test_the_stages_that_ship():
    stages = read_stages(["01", "02", "03", "04", "05"], None, CONF)
    assert [(each.n_positives, each.n_negatives) for each in stages] == [(32, 24), *[(16, 8)] * 4]
    chained = read_stages([], CONF / "text_curriculum" / "chain_default.yaml", CONF)
    assert [each.name for each in chained] == [f"0{number}_text" for number in range(1, 6)]
    assert chained[0].max_epochs == 16
    assert chained[0].learning_rate == pytest.approx(2e-4)


def test_two_folders_that_disagree_about_a_stage_are_refused(tmp_path):
    for folder, number in (("curriculum", 24), ("text_curriculum", 8)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "01_stage.yaml").write_text(f"name: 01_stage\nn_negatives: {number}\n")
    with pytest.raises(UsageError, match="they differ, so one of them would be of no effect"):
        read_stages(["01"], None, tmp_path)
    with pytest.raises(UsageError, match=r"no stage '07'.*There are: 01_stage"):
        read_stages(["07"], None, tmp_path)


def test_settings_are_laid_over_each_other(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("data_loader:\n  batch_size: 7\n")
    config = read_config(path, on_cpu=False, given=["loss.temperature=0.2"])
    assert config["data_loader"]["batch_size"] == 7
    assert config["data_loader"]["tokenization"]["max_length"] == 512
    assert config["loss"]["temperature"] == pytest.approx(0.2)
    assert read_config(path, on_cpu=True, given=[])["data_loader"]["batch_size"] == 64
    with pytest.raises(UsageError, match=r"loss\.heat"):
        read_config(path, on_cpu=False, given=["loss.heat=1"])


def test_an_unknown_name_in_a_stage_is_refused(tmp_path):
    (tmp_path / "curriculum").mkdir()
    (tmp_path / "curriculum" / "01_stage.yaml").write_text("name: 01_stage\nn_negative: 3\n")
    with pytest.raises(DataError, match="a stage has no n_negative"):
        read_stages(["01"], None, tmp_path)


def test_perfect_distances_have_perfect_metrics(tree):
    found = tree_metrics(tree.distances * 2, tree.distances)
    assert found["cophenetic"] == pytest.approx(1)
    assert found["spearman"] == pytest.approx(1)
    assert found["ndcg_5"] == pytest.approx(1)
    assert found["distortion_mean"] == pytest.approx(2)
    assert found["distortion_std"] == pytest.approx(0)
    retrieved = retrieval_metrics(tree.distances, tree.paths, tree.levels)
    assert retrieved == {"parent_1": 1.0, "child_5": 1.0}
    assert tree_metrics(OTHER_SECTOR - tree.distances, tree.distances)["cophenetic"] < 0


def test_ndcg_by_hand():
    tree = np.array([[0, 1, 4], [1, 0, 2], [4, 2, 0]], dtype=float)
    found = ndcg(np.array([[0, 9, 1], [1, 0, 2], [1, 2, 0]], dtype=float), tree, 1)
    assert found == pytest.approx((0 + 1 + 0) / 3, abs=1e-5)


def test_points_in_one_place_have_collapsed():
    points = np.random.default_rng(0).normal(size=(20, 5))
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    assert not spread_metrics(points, apart)["is_collapsed"]
    assert spread_metrics(points * 1e-4, apart)["is_collapsed"]
    assert spread_metrics(points, np.ones((20, 20)))["is_collapsed"]


SMALL_CONFIG = """
model:
  base_model_name: random
  encoder: {layers: 1, width: 16, heads: 2}
data_loader: {tokenization: {max_length: 8}}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_stage_has_the_batch_and_the_negatives_that_are_asked_for(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(SMALL_CONFIG)

    trainer, module, data = job_for(config_path=config, batch_size=6, n_negatives=3)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))

    assert trainer.precision == "bf16-mixed"  # what the default says, on this machine
    assert "16-mixed" in DEFAULT.read_text()
    assert trainer.accumulate_grad_batches == 1
    assert module.sizes.encoder.base == "random"
    assert batch["negatives"].shape == (6, 3)
