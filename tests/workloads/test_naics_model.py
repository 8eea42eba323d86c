"""NAICS's geometry, experts, losses and encoders, against direct computation."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import memfit
from memfit.strategies import build_strategy

pytest.importorskip("lightning")
pytest.importorskip("peft")

from memfit_workloads.naics.data_module import NaicsData, StepSettings
from memfit_workloads.naics.embedder import EmbedderSizes
from memfit_workloads.naics.encoders import RANDOM, ChannelEncoders, EncoderSizes
from memfit_workloads.naics.experts import MixtureOfExperts, balance_loss
from memfit_workloads.naics.lorentz import (
    LorentzProjection,
    exponential_map,
    inner_products,
    pair_distances,
    radii,
    violation,
)
from memfit_workloads.naics.losses import PairSums, decoupled, info_nce, lambda_rank, summed
from memfit_workloads.naics.module import (
    LossSettings,
    NaicsContrastive,
    OptimizerSettings,
    tree_distances,
)
from memfit_workloads.naics.sampling import Stage
from memfit_workloads.naics.texts import CHANNELS, read_texts
from memfit_workloads.naics.tokens import token_table, trimmed
from memfit_workloads.naics.tree import make_tree

TINY = EncoderSizes(
    base=RANDOM, vocabulary=300, width=16, layers=1, heads=2, hidden=24, positions=16
)
SIZES = EmbedderSizes(encoder=TINY, expert_hidden=8)
LENGTHS = dict.fromkeys(CHANNELS, 8)


@pytest.fixture(scope="module")
def tree():
    codes = [code for code in read_texts() if code.startswith(("11", "21", "31", "22"))]
    return make_tree(codes)


@pytest.fixture(scope="module")
def table(tree):
    texts = read_texts()
    return token_table([texts[code] for code in tree.codes], TINY, LENGTHS)


def data_of(tree, table, batch_size, negatives="shared", **stage):
    wanted = Stage(name="01", **{"n_positives": 2, "n_negatives": 5, **stage})
    settings = StepSettings(batch_size=batch_size, negatives=negatives)
    return NaicsData(tree, table, range(len(tree)), wanted, settings)


def step_of(data):
    return data.make_step([tuple(pair) for pair in data.pairs[: data.settings.batch_size]])


# --- Geometry ---


@pytest.mark.parametrize("curvature", [0.25, 1.0, 4.0])
def test_points_lie_on_the_hyperboloid_of_any_curvature(curvature):
    torch.manual_seed(0)
    projection = LorentzProjection(6, curvature, 2.0).double()
    vectors = torch.randn(9, 6, dtype=torch.float64) * 3
    points = projection(vectors)
    assert points.shape == (9, 7)  # D + 1, not D + 2
    assert violation(points, curvature) < 1e-12
    tangent = projection.linear(vectors)[:, 1:]
    torch.testing.assert_close(radii(points, curvature), tangent.norm(dim=1).clamp(max=2.0))


@pytest.mark.parametrize("curvature", [0.25, 1.0, 4.0])
def test_distances_are_lengths_along_geodesics(curvature):
    """Through the origin they are differences of tangent lengths; sqrt(c) arcosh(-<u, v>) is not."""
    direction = F.normalize(torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64))
    lengths = torch.tensor([[-0.8], [0.3], [1.4]], dtype=torch.float64)
    points = exponential_map(lengths * direction, curvature)
    found = pair_distances(points, points, curvature)
    expected = (lengths - lengths.T).abs()
    apart = expected > 0
    torch.testing.assert_close(found[apart], expected[apart])
    wrong = curvature**0.5 * (-inner_products(points, points)).clamp(min=1).acosh()
    assert torch.allclose(wrong[apart], expected[apart]) == (curvature == 1.0)


# --- Experts ---


def test_experts_are_those_that_rows_would_be_sent_to():
    torch.manual_seed(0)
    layer = MixtureOfExperts(
        6, hidden=5, num_experts=4, top_k=2, dropout=0.0, is_residual=False
    ).double()
    rows = torch.randn(7, 6, dtype=torch.float64)
    found, logits = layer(rows)
    for row, out, scores in zip(rows, found, logits, strict=True):
        best = scores.topk(2)
        sent = sum(
            weight * layer.outer[number](layer.inner[number](row).relu())
            for weight, number in zip(best.values.softmax(0), best.indices, strict=True)
        )
        torch.testing.assert_close(out, sent)


def test_balance_by_hand_and_not_a_mean_over_parts():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 0.5], [1.0, 0.0, 2.0, 3.0]])
    chosen = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]) / 2
    expected = 4 * (chosen.mean(0) * logits.softmax(1).mean(0)).sum()
    whole = balance_loss(logits, 2)
    torch.testing.assert_close(whole, expected)
    parts = torch.stack([balance_loss(row[None], 2) for row in logits]).mean()
    assert abs(parts - whole) > 0.1  # so accumulation over batches trains something else


# --- Losses ---


def test_contrastive_losses_by_hand():
    positive = torch.tensor([1.0, 0.5])
    negatives = torch.tensor([[0.2, -0.4, 9.0], [0.1, 0.3, -0.2]])
    counts = torch.tensor([[True, True, False], [True, True, True]])
    rows = [negatives[0, :2], negatives[1]]
    dcl = torch.stack([row.logsumexp(0) - p for row, p in zip(rows, positive, strict=True)]).mean()
    nce = torch.stack(
        [torch.cat([p[None], row]).logsumexp(0) - p for row, p in zip(rows, positive, strict=True)]
    ).mean()
    torch.testing.assert_close(decoupled(positive, negatives, counts).mean(), dcl)
    torch.testing.assert_close(info_nce(positive, negatives, counts).mean(), nce)


def test_an_anchor_without_negatives_counts_for_nothing():
    positive = torch.tensor([1.0, 0.5], requires_grad=True)
    negatives = torch.tensor([[0.2], [0.1]])
    counts = torch.tensor([[True], [False]])
    loss = decoupled(positive, negatives, counts).sum()
    torch.testing.assert_close(loss, negatives[0, 0] - positive[0])
    loss.backward()
    assert positive.grad.tolist() == [-1.0, 0.0]


def test_the_hierarchy_loss_by_hand_and_from_parts():
    torch.manual_seed(0)
    tree = torch.randint(0, 5, (6, 8)).double()
    here = torch.rand(6, 8, dtype=torch.float64)
    pairs = tree > 0
    own, its = here[pairs] / here[pairs].mean(), tree[pairs] / tree[pairs].mean()
    expected = (own - its).square().mean()
    torch.testing.assert_close(PairSums.of(here, tree).hierarchy_loss(), expected)
    parts = summed(lambda start, end: PairSums.of(here[start:end], tree[start:end]), 6, 4)
    torch.testing.assert_close(PairSums(*parts).hierarchy_loss(), expected)
    assert PairSums.of(tree * 3, tree).hierarchy_loss() < 1e-12


def test_the_cost_of_a_wrong_order_by_hand():
    distances = torch.tensor([[0.5, 0.2, 1.0, 0.1], [0.3, 0.9, 0.1, 0.4]], dtype=torch.float64)
    tree = torch.tensor([[1.0, 4.0, 9.0, 2.0], [2.0, 3.0, 5.0, 9.0]], dtype=torch.float64)
    there = torch.tensor([[True, True, True, False], [True, True, True, True]])
    expected = []
    for row, steps, counts in zip(distances, tree, there, strict=True):
        own, gains = row[counts], 1 - steps[counts] / 9
        place = {int(code): rank for rank, code in enumerate(own.argsort())}
        ideal = sum(gain / math.log2(rank + 2) for rank, gain in enumerate(sorted(-gains)))
        cost = torch.zeros((), dtype=torch.float64)
        for near, far in itertools.permutations(range(len(own)), 2):
            if gains[near] > gains[far]:
                change = abs(1 / math.log2(place[near] + 2) - 1 / math.log2(place[far] + 2))
                wrong = (1 + (own[near] - own[far]).exp()).log()
                cost += (gains[near] - gains[far]) * change * wrong
        expected.append(cost / -ideal)
    found = lambda_rank(distances, tree, there)
    torch.testing.assert_close(found, torch.stack(expected))
    alone = torch.tensor([[True, False, False, False]]).expand(2, 4)
    assert lambda_rank(distances, tree, alone).tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_the_loss_is_the_same_under_both_paddings(tree, table):
    sizes = replace(SIZES, unit_length=True)
    module = NaicsContrastive(sizes, LossSettings(rank_weight=0.275), OptimizerSettings()).double()
    module.eval()
    found = {}
    for padding in ("max_length", "longest"):
        data = data_of(tree, table, 6)
        data.make_step._settings = replace(data.settings, padding=padding)
        batch = step_of(data)
        found[padding] = batch["tokens"]["description"].shape, module.loss_terms(batch)
    (whole, expected), (short, terms) = found.values()
    assert short[-1] <= whole[-1]
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value, rtol=1e-10, atol=1e-10)


def test_what_is_projected_may_have_one_length(tree, table):
    sizes = replace(SIZES, unit_length=True, start_norm=0.75)
    module = NaicsContrastive(sizes, LossSettings(), OptimizerSettings()).double().eval()
    with torch.no_grad():
        points = module({channel: ids[:9] for channel, ids in table.items()}).points
    reach = radii(points, 1.0)
    torch.testing.assert_close(reach, torch.full_like(reach, 0.75))


def test_a_large_step_goes_through_its_pairs_in_parts(tree, table, monkeypatch):
    batch = step_of(data_of(tree, table, 7))
    module = NaicsContrastive(SIZES, LossSettings(), OptimizerSettings()).double().eval()
    found = []
    for pairs in (1 << 18, 14 * 14 // 3):
        monkeypatch.setattr("memfit_workloads.naics.module._PAIRS_AT_ONCE", pairs)
        module.zero_grad()
        terms = module.loss_terms(batch)
        terms["loss"].backward()
        found.append((terms, [p.grad for p in module.parameters() if p.grad is not None]))
    (whole, gradient), (parts, other) = found
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value)
    torch.testing.assert_close(other, gradient)


def test_distances_of_the_tree_from_paths(tree):
    paths = torch.from_numpy(tree.paths)
    expected = torch.from_numpy(tree.distances)
    torch.testing.assert_close(tree_distances(paths, paths).double(), expected)
    some = paths[[3, 3, 4]]
    twice = tree_distances(some, some)
    assert twice[0, 1] == 0
    assert twice[0, 2] == expected[3, 4]


# --- Encoders ---


def test_frozen_weights_exist_once_and_results_are_those_of_whole_encoders():
    torch.manual_seed(0)
    encoders = ChannelEncoders(TINY).eval()
    first, second = (encoders.by_channel[name] for name in CHANNELS[:2])
    shared = [name for name, weight in first.named_parameters() if not weight.requires_grad]
    assert shared
    for name in shared:
        assert first.get_parameter(name) is second.get_parameter(name)
    learns = [weight for weight in first.parameters() if weight.requires_grad]
    assert not {id(weight) for weight in learns} & {id(weight) for weight in second.parameters()}
    assert all(
        "lora" in name for name, weight in encoders.named_parameters() if weight.requires_grad
    )


def test_frozen_layers_have_no_lora():
    encoders = ChannelEncoders(replace(TINY, layers=2, frozen_layers=1))
    learns = [name for name, weight in encoders.named_parameters() if weight.requires_grad]
    assert learns
    assert all(".layer.1." in name for name in learns)


@pytest.mark.slow
def test_padding_and_other_rows_change_no_point(tree, table):
    module = NaicsContrastive(SIZES, LossSettings(), OptimizerSettings()).double().eval()
    rows = [3, 9, 20, 40]
    whole = {channel: ids[rows] for channel, ids in table.items()}
    short = {channel: trimmed(ids, "longest") for channel, ids in whole.items()}
    assert any(short[channel].shape != whole[channel].shape for channel in CHANNELS)
    longer = {channel: F.pad(ids, (0, 4)) for channel, ids in whole.items()}
    with torch.no_grad():
        expected = module(whole).points
        for tokens in (short, longer):
            torch.testing.assert_close(module(tokens).points, expected)
        one = module({channel: ids[1:2] for channel, ids in whole.items()}).points
        torch.testing.assert_close(one, expected[1:2])


def test_a_code_without_descriptions_begins_as_its_title(table):
    module = NaicsContrastive(SIZES, LossSettings(), OptimizerSettings()).double().eval()
    tokens = {channel: ids[:4].clone() for channel, ids in table.items()}
    for channel in CHANNELS[1:]:
        tokens[channel].zero_()
    with torch.no_grad():
        vectors = module.embedder.encoders(tokens)
        points = module(tokens).points
    torch.testing.assert_close(vectors, vectors[:, :1].expand_as(vectors))
    assert points.isfinite().all()
    tangent = radii(points, 1.0)
    torch.testing.assert_close(tangent, torch.full_like(tangent, SIZES.start_norm))


# --- Steps ---


def test_views_of_a_step(tree, table):
    own = step_of(data_of(tree, table, 6, negatives="own"))
    shared = step_of(data_of(tree, table, 6))
    assert own["tokens"]["title"].shape == (6, 7, 8)
    assert shared["tokens"]["title"].shape == (6, 2, 8)
    for step in (own, shared):
        paths = step["paths"].flatten(0, 1)
        distances = tree_distances(paths, paths)
        views = step["paths"].shape[1]
        positive = distances[range(0, 6 * views, views), range(1, 6 * views, views)]
        negative = distances[::views].gather(1, step["negatives"])
        assert (negative > positive[:, None])[step["is_negative"]].all()
    assert own["is_negative"].all()
    assert shared["is_negative"].any()


def test_n_positives_lengthens_the_epoch_and_leaves_the_step(tree, table):
    few, many = (data_of(tree, table, 6, n_positives=count) for count in (1, 4))
    assert len(many.pairs) > 2 * len(few.pairs)
    shapes = [
        {name: ids.shape for name, ids in step_of(each)["tokens"].items()} for each in (few, many)
    ]
    assert shapes[0] == shapes[1]


# --- Cached gradients ---


def job_of(batch, *, dropout=0.2):
    encoder = replace(TINY, dropout=dropout, lora_dropout=dropout)
    sizes = replace(SIZES, encoder=encoder, expert_dropout=dropout, residual=False)

    def model():
        return NaicsContrastive(
            sizes, LossSettings(balance_weight=3.0), OptimizerSettings()
        ).double()

    return memfit.Job(
        model=model,
        batch=lambda size: torch.utils._pytree.tree_map(lambda each: each[:size], batch),
        loss=lambda model, batch: model.loss_terms(batch)["loss"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=len(batch["negatives"]),
    )


def gradients(job, plan, batch):
    torch.manual_seed(0)
    with memfit.start(job, plan, guard=False) as run:
        caught = []
        run.optimizer.register_step_pre_hook(
            lambda *_: caught.extend(
                p.grad.clone() for p in run.model.parameters() if p.grad is not None
            )
        )
        torch.manual_seed(1)
        result = run.step(batch)
    return float(result.loss), caught


PIECE = 5


class InPieces:
    """An embedder that is called piece by piece in one pass: it draws the masks of the pieces."""

    def __init__(self, embedder):
        self.embedder = embedder

    def __call__(self, tokens):
        pieces = zip(*(ids.split(PIECE) for ids in tokens.values()), strict=True)
        found = [self.embedder(dict(zip(tokens, piece, strict=True))) for piece in pieces]
        return [torch.cat(column) for column in zip(*found, strict=True)]


def in_one_pass(job):
    def loss(model, batch):
        embedder = model._modules.pop("embedder")
        try:
            model.__dict__["embedder"] = InPieces(embedder)
            return model.loss_terms(batch)["loss"]
        finally:
            del model.__dict__["embedder"]
            model._modules["embedder"] = embedder

    return replace(job, loss=loss)


def cached(**settings):
    found = build_strategy("cached-gradients", {"micro_batch_size": PIECE, **settings})
    return memfit.Plan(strategies=(found,))


@pytest.mark.slow
@pytest.mark.parametrize("negatives", ["own", "shared"])
def test_cached_gradients_are_those_of_the_whole_step_with_dropout_and_experts(
    tree, table, negatives
):
    batch = step_of(data_of(tree, table, 7, negatives=negatives))
    job = job_of(batch)
    loss, found = gradients(job, cached(), batch)
    expected_loss, expected = gradients(in_one_pass(job), memfit.Plan(), batch)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert len(found) == len(expected) > 20
    for mine, its in zip(found, expected, strict=True):
        assert float((mine - its).norm()) <= 1e-10 * max(float(its.norm()), 1e-6)


@pytest.mark.slow
def test_cached_gradients_without_dropout_are_the_plain_step(tree, table):
    batch = step_of(data_of(tree, table, 7))
    job = job_of(batch, dropout=0.0)
    loss, found = gradients(job, cached(), batch)
    expected_loss, expected = gradients(job, memfit.Plan(), batch)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    for mine, its in zip(found, expected, strict=True):
        assert float((mine - its).norm()) <= 1e-10 * max(float(its.norm()), 1e-6)


@pytest.mark.slow
def test_micro_batches_are_refused_for_the_loss_over_the_step(tree, table):
    batch = step_of(data_of(tree, table, 6))
    job = job_of(batch, dropout=0.0)
    plan = memfit.Plan(strategies=(build_strategy("micro-batching", {"micro_batch_size": 3}),))
    with pytest.raises(memfit.MemfitError, match="couples the samples"):
        gradients(job, plan, batch)
