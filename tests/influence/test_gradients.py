"""Inner products from factors equal those of whole gradients, whatever the model is made of."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.influence.models import CASES, Case, classify, dense_gradients, labels, make
from torch import nn

from memfit.errors import CoupledSamplesError, JobError
from memfit.influence.gradients import GradientReader
from memfit.influence.proof import prove
from memfit.influence.samples import Samples

NEAR = 1e-12
TINY_BYTES, AMPLE_BYTES = 2**11, 2**26


def reader_of(case: Case) -> GradientReader:
    parameters = dict(case.model.named_parameters())
    return GradientReader(model=case.model, loss=case.loss, parameters=parameters)


def errors_of(case: Case, limit_bytes: int) -> tuple[float, float]:
    """Return the relative errors of inner products and of squared norms."""
    samples, reader = Samples.of(case.samples), reader_of(case)
    prove(reader, samples)
    few, more = reader.read(samples, torch.arange(4)), reader.read(samples, torch.arange(1, 6))
    dense = dense_gradients(case, range(6))
    products, norms = dense[:4] @ dense[1:].T, dense[:4].square().sum(dim=1)
    return (
        float((few.inner_products(more, limit_bytes) - products).abs().max() / norms.max()),
        float((few.squared_norms(limit_bytes) - norms).abs().max() / norms.max()),
    )


@pytest.mark.parametrize("limit_bytes", [TINY_BYTES, AMPLE_BYTES])
@pytest.mark.parametrize("name", CASES)
def test_inner_products_are_those_of_whole_gradients(name: str, limit_bytes: int) -> None:
    assert max(errors_of(make(name), limit_bytes)) < NEAR


@pytest.mark.parametrize("name", ["transformer", "convolutions", "tied", "lstm", "positions"])
def test_everything_is_read_as_factors(name: str) -> None:
    case = make(name)
    reader = reader_of(case)

    assert prove(reader, Samples.of(case.samples)) < NEAR
    assert not reader.unread


def test_what_is_not_read_is_named_with_its_operator() -> None:
    case = make("functional")
    reader = reader_of(case)
    prove(reader, Samples.of(case.samples))

    assert set(reader.unread) == {"power", "mixed"}
    assert "PowBackward" in reader.unread["power"]


def test_a_formula_that_is_wrong_is_found_and_left_to_backward_passes(monkeypatch) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs, weight):
            ctx.save_for_backward(inputs, weight)
            return inputs * weight

        @staticmethod
        def backward(ctx, grad):
            inputs, weight = ctx.saved_tensors
            return grad * weight, (grad * inputs).sum(dim=0)

        @staticmethod
        def per_sample_factor(node, use):
            from memfit.influence.factors import dense

            inputs = 2.0 * node.saved_tensors[0]
            return lambda grad, layout: dense(grad * inputs, use.shape)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(CLASSES := 4))
            self.head = nn.Linear(CLASSES, CLASSES)

        def forward(self, inputs):
            return self.head(Doubled.apply(inputs, self.weight))

    torch.manual_seed(0)
    case = Case(Model().double(), classify, (torch.randn(6, 4).double(), labels(6)))
    reader = reader_of(case)
    prove(reader, Samples.of(case.samples))

    assert set(reader.unread) == {"weight"}
    assert "were off by" in reader.unread["weight"]
    assert max(errors_of(case, AMPLE_BYTES)) < NEAR


def test_batches_of_the_same_size_as_a_sequence_are_not_mistaken() -> None:
    case = make("transformer, sequence first", number=7)
    samples, reader = Samples.of(case.samples), reader_of(case)
    prove(reader, samples)
    read = reader.read(samples, torch.arange(7))  # seven samples of seven tokens
    dense = dense_gradients(case, range(7))

    products = dense @ dense.T
    error = (read.inner_products(read, AMPLE_BYTES) - products).abs().max() / products.max()
    assert float(error) < NEAR


def test_sequences_of_other_lengths_than_the_first_are_read() -> None:
    case = make("tied")
    samples, reader = Samples.of(case.samples), reader_of(case)
    prove(reader, samples)
    longer = torch.randint(0, 9, (5, 13))
    case.samples = longer
    read = reader.read(Samples.of(longer), torch.arange(5))
    dense = dense_gradients(case, range(5))

    products = dense @ dense.T
    error = (read.inner_products(read, AMPLE_BYTES) - products).abs().max() / products.max()
    assert float(error) < NEAR


def test_batch_normalisation_in_training_is_refused_by_name() -> None:
    case = make("convolutions")
    case.model.train()

    with pytest.raises(CoupledSamplesError, match="1 normalise with the statistics of the batch"):
        prove(reader_of(case), Samples.of(case.samples))


def test_a_loss_that_compares_samples_is_refused() -> None:
    def contrast(model, batch):
        hidden = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(hidden @ hidden.T, torch.arange(len(hidden)), reduction="none")

    case = make("lstm")
    case.loss = contrast

    with pytest.raises(CoupledSamplesError, match="without the others"):
        prove(reader_of(case), Samples.of(case.samples))


@pytest.mark.parametrize(
    ("reduce", "found"),
    [(lambda losses: losses.mean(), r"\(\)"), (lambda losses: losses.repeat(2), "6 losses for 3")],
)
def test_a_loss_that_is_not_one_for_each_sample_is_refused(reduce, found: str) -> None:
    case = make("lstm")
    case.loss = lambda model, batch: reduce(classify(model, batch))

    with pytest.raises(JobError, match=found):
        prove(reader_of(case), Samples.of(case.samples))


def test_layers_under_autocast_are_read_as_far_as_its_rounding_goes() -> None:
    def under_autocast(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(batch[0])
        return F.cross_entropy(scores.float(), batch[1], reduction="none")

    case = make("transformer")
    case.model.float()
    case.loss = under_autocast
    reader = reader_of(case)
    prove(reader, Samples.of(case.samples))

    assert not reader.unread
    assert reader.types["head.weight"] is torch.bfloat16
    assert 1e-7 < max(errors_of(case, AMPLE_BYTES)) < 0.03


@pytest.mark.slow
def test_layers_under_activation_checkpointing_are_read() -> None:
    class Recomputed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, inputs):
            return torch.utils.checkpoint.checkpoint(self.inner, inputs, use_reentrant=False)

    case = make("convolutions")
    case.model[3], case.model[4] = Recomputed(case.model[3]), Recomputed(case.model[4])
    reader = reader_of(case)
    prove(reader, Samples.of(case.samples))

    assert not reader.unread
    assert max(errors_of(case, AMPLE_BYTES)) < NEAR
