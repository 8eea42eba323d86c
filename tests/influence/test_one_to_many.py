"""Losses of rows against all candidates: streamed, and read without scores or dense gradients."""

import pytest
import torch
import torch.nn.functional as F
from tests.influence.models import Case, dense_gradients
from tests.influence.test_gradients import AMPLE_BYTES, NEAR, TINY_BYTES, errors_of, reader_of

from memfit.errors import JobError
from memfit.influence.one_to_many import one_to_many_losses
from memfit.influence.proof import prove
from memfit.influence.samples import Samples
from memfit.losses import one_to_many_bce
from memfit_workloads.conve.model import build_model
from memfit_workloads.conve.sizes import ConvESizes

ENTITIES, RELATIONS, ROWS, SMOOTHING = 53, 4, 7, 0.1


def conve():
    sizes = ConvESizes(
        num_entities=ENTITIES,
        num_relations=RELATIONS,
        embedding_dim=20,
        embedding_height=4,
        embedding_width=5,
        output_channels=3,
    )
    model = build_model(sizes, 0).double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        model.entity_bias.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0.0, 0.2)
    positives = torch.randint(-1, ENTITIES, (ROWS, 5))
    heads = torch.randint(0, ENTITIES, (ROWS,))
    heads[1:3] = positives[0, 0] = 11  # tails that are heads elsewhere, and heads that coincide
    return model, (heads, torch.randint(0, 2 * RELATIONS, (ROWS,)), positives)


def streamed(model, batch):
    heads, relations, positives = batch
    query, table = model.encode(heads, relations), model.entity_embedding.weight
    return one_to_many_losses(
        query, table, model.entity_bias, positives, label_smoothing=SMOOTHING, chunk=8
    )


def whole(model, batch):
    heads, relations, positives = batch
    scores = model(heads, relations)
    listed = scores.new_zeros(len(heads), ENTITIES + 1).scatter_(1, positives + 1, 1.0)[:, 1:]
    listed = listed * (1 - SMOOTHING) + SMOOTHING / ENTITIES
    return F.binary_cross_entropy_with_logits(scores, listed, reduction="none").mean(dim=1)


def target_alone(model, batch):
    heads, relations, positives = batch
    tails = positives.amax(dim=1)
    query = model.encode(heads, relations)
    return F.softplus(-((query * model.entity_embedding(tails)).sum(1) + model.entity_bias[tails]))


def test_losses_are_those_of_the_whole_computation() -> None:
    model, batch = conve()
    query = model.encode(batch[0], batch[1])
    mean = one_to_many_bce(
        query, model.entity_embedding.weight, model.entity_bias, batch[2], label_smoothing=SMOOTHING
    )

    torch.testing.assert_close(streamed(model, batch), whole(model, batch), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(streamed(model, batch).mean(), mean, rtol=1e-14, atol=1e-14)


def test_gradients_are_those_of_the_whole_computation() -> None:
    model, batch = conve()
    parameters = list(model.parameters())
    found = torch.autograd.grad(streamed(model, batch).square().sum(), parameters)
    expected = torch.autograd.grad(whole(model, batch).square().sum(), parameters)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("limit_bytes", [TINY_BYTES, AMPLE_BYTES])
@pytest.mark.parametrize("loss", [streamed, whole, target_alone])
def test_a_table_that_is_looked_up_and_scored_against_has_its_cross_terms(
    loss, limit_bytes: int
) -> None:
    model, batch = conve()

    assert max(errors_of(Case(model, loss, batch), limit_bytes)) < NEAR


@pytest.mark.parametrize("loss", [streamed, whole, target_alone])
def test_all_of_conve_is_read_as_factors(loss) -> None:
    model, batch = conve()
    reader = reader_of(Case(model, loss, batch))
    prove(reader, Samples.of(batch))

    assert not reader.unread


def test_two_losses_of_one_model_have_inner_products() -> None:
    model, batch = conve()
    samples = Samples.of(batch)
    cases = [Case(model, loss, batch) for loss in (target_alone, streamed)]
    one, other = (reader_of(case).read(samples, torch.arange(ROWS)) for case in cases)
    dense = [dense_gradients(case, range(ROWS)) for case in cases]

    products = dense[0] @ dense[1].T
    error = (one.inner_products(other, TINY_BYTES) - products).abs().max() / products.abs().max()
    assert float(error) < NEAR


@pytest.mark.parametrize(
    "wrong",
    [
        {"query": torch.zeros(3, 4)},
        {"positives": torch.zeros(2, 1)},
        {"label_smoothing": 1.0},
        {"chunk": 0},
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(wrong) -> None:
    given = {
        "query": torch.zeros(2, 4),
        "candidates": torch.zeros(5, 4),
        "bias": None,
        "positives": torch.zeros(2, 1, dtype=torch.int64),
    }

    with pytest.raises(JobError, match="needed are query"):
        one_to_many_losses(**given | wrong)
