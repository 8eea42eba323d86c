"""DreaMS' model and losses, held to the document's tensors and to one-hot targets."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import memfit
from memfit.strategies import ActivationCheckpointing
from memfit_workloads.dreams.backbone import DreamsBackbone, key_bias, pairwise_bias
from memfit_workloads.dreams.batches import trimmed
from memfit_workloads.dreams.fourier import FourierBranch, fourier_features, frequencies_of
from memfit_workloads.dreams.losses import (
    cosine_loss,
    focal_bce,
    focal_loss,
    masked_mz_losses,
    triplet_loss,
)
from memfit_workloads.dreams.schedule import noam_factor
from memfit_workloads.dreams.sizes import DOCUMENT, PAIRWISE, PLAIN, DreamsSizes

SMALL = DreamsSizes(
    d_fourier=24, d_peak=8, n_layers=3, n_heads=4, fourier_width=16, fourier_depth=3,
    mz_accuracy=1e-2, dropout=0.0, fourier_chunk=100, loss_rows=5,
)  # fmt: skip
AS_DOCUMENTED = {"bias_form": PAIRWISE, "attention": PLAIN, "fourier_chunk": 0}
quiet = Console(quiet=True)


def spectra(num: int, num_tokens: int, num_padded: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mz = torch.rand(num, num_tokens, dtype=torch.float64, generator=generator) * 900 + 50
    mz[:, num_tokens - num_padded :] = 0
    intensity = torch.rand(num, num_tokens, dtype=torch.float64, generator=generator)
    return torch.stack([mz, intensity * (mz > 0)], -1)


def backbone(**changed) -> DreamsBackbone:
    torch.manual_seed(0)
    return DreamsBackbone(replace(SMALL, **changed)).double()


def test_the_bias_per_key_gives_the_attention_of_the_differences():
    fourier = torch.randn(3, 7, 11, dtype=torch.float64)
    logits = torch.randn(3, 2, 7, 7, dtype=torch.float64)

    exact = torch.softmax(logits + key_bias(fourier), -1)
    tensor = torch.softmax(logits + pairwise_bias(fourier), -1)

    torch.testing.assert_close(exact, tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("changed", [{}, {"attention": PLAIN}])
def test_outputs_and_gradients_are_those_of_the_document(changed):
    batch = spectra(5, 11, num_padded=3)
    found = []
    for sizes in (changed, AS_DOCUMENTED):
        model = backbone(**sizes)
        out = model(batch)[:, :8]
        out.square().sum().backward()
        found.append((out.detach(), [each.grad for each in model.parameters()]))
    (out, gradients), (expected, expected_gradients) = found

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_padding_is_seen_by_nobody():
    model, batch = backbone(), spectra(4, 12, num_padded=5)
    wide = F.pad(batch, (0, 0, 0, 9))

    torch.testing.assert_close(model(wide)[:, :7], model(batch[:, :7]), rtol=0, atol=1e-12)
    shorter = trimmed({"spectra": wide[None]})["spectra"][0]
    assert shorter.shape[1] == 7
    torch.testing.assert_close(shorter, batch[:, :7])


def test_a_batch_of_one_gives_what_it_gives_among_others():
    model, batch = backbone(), spectra(4, 9, num_padded=2)

    alone = model.embed(batch[:1])

    assert alone.shape == (1, 32)
    torch.testing.assert_close(alone, model.embed(batch)[:1], rtol=0, atol=1e-12)


def test_the_frequencies_are_those_of_the_paper():
    assert len(frequencies_of(1e-4)) == 5997
    own = frequencies_of(1e-2)
    assert own[:2].tolist() == [50, 25]
    assert own[-1] == 1 / 999
    assert DOCUMENT.d_model == 1024
    with torch.device("meta"):
        blocks = sum(p.numel() for p in DreamsBackbone(DOCUMENT).blocks.parameters() if p.dim() > 1)
    assert blocks == 88_080_384


def test_phases_keep_the_finest_period_of_a_heavy_ion():
    mz = torch.tensor([999.99995], dtype=torch.float64)
    fast = frequencies_of(1e-4)[:1]

    features = fourier_features(mz, fast, torch.float32)

    angle = 2 * math.pi * math.fmod(999.99995 * fast.item(), 1)
    assert features[0].tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-6)


def test_frequencies_stay_double_when_weights_do_not():
    branch = FourierBranch(SMALL).bfloat16()

    assert branch.frequencies.dtype == torch.float64
    torch.testing.assert_close(branch.frequencies, frequencies_of(1e-2), rtol=0, atol=0)


def test_the_focal_loss_by_index_is_that_of_one_hot_targets():
    logits = torch.randn(9, 13, dtype=torch.float64)
    target = torch.randint(13, (9,))
    one_hot = F.one_hot(target, 13).double()
    p = torch.softmax(logits, -1)
    expected = -(one_hot * (1 - p) ** 5 * p.log()).sum(-1)

    torch.testing.assert_close(focal_loss(logits, target), expected, rtol=0, atol=1e-12)


def test_few_rows_at_a_time_give_the_loss_of_all():
    hidden = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(17, dtype=torch.float64, requires_grad=True)
    target = torch.randint(17, (13,))
    found = []
    for rows in (0, 5):
        loss = masked_mz_losses(hidden, weight, bias, target, rows)
        gradients = torch.autograd.grad(loss.square().sum(), (hidden, weight, bias))
        found.append((loss.detach(), *gradients))

    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_other_losses_are_what_they_say():
    logits, target = torch.tensor([0.3, -1.2]), torch.tensor([1.0, 0.0])
    plain = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p_true = torch.tensor([logits.sigmoid()[0], 1 - logits.sigmoid()[1]])

    torch.testing.assert_close(focal_bce(logits, target, 0), plain)
    torch.testing.assert_close(focal_bce(logits, target, 2.0), (1 - p_true) ** 2 * plain)
    a, b = torch.eye(2)[:1], torch.eye(2)[1:]
    assert cosine_loss(a, a).item() == pytest.approx(0)
    assert cosine_loss(a, b).item() == pytest.approx(1)
    assert triplet_loss(a, a, b, 0.1).item() == 0
    assert triplet_loss(a, b, a, 0.1).item() == pytest.approx(1.1)


def test_the_noam_schedule_rises_and_falls():
    factors = [noam_factor(step, 10) for step in range(40)]

    assert factors[0] == 0.1
    assert max(factors) == factors[9] == 1
    assert factors[39] == 0.5
    assert noam_factor(7, 0) == 1


@pytest.mark.slow
def test_the_exact_bias_takes_a_fraction_of_the_documents_way_where_blocks_are_recomputed():
    """At the document's 101 tokens and batch of 64, one head's width and two blocks."""
    sizes = DreamsSizes(n_layers=2, fourier_width=64, fourier_depth=2, d_fourier=244, d_peak=12)
    plan = memfit.Plan(strategies=(ActivationCheckpointing(),))
    above = []
    for changed in ({}, AS_DOCUMENTED):
        own = replace(sizes, **changed)
        job = memfit.Job(
            model=lambda own=own: DreamsBackbone(own),
            batch=lambda num: spectra(num, 101, 1),
            loss=lambda model, batch: model.embed(batch).square().mean(),
            optimizer=lambda parameters: torch.optim.Adam(parameters),
            batch_size=64,
        )
        predicted = memfit.predict(job, plan=plan)
        above.append(_above_weights(predicted.peak_allocated_bytes, DreamsBackbone(own)))

    assert above[0] <= 0.4 * above[1]


def _above_weights(peak_bytes: int, model: torch.nn.Module) -> int:
    """Return what a peak holds beside weights, gradients and Adam's states."""
    return peak_bytes - 4 * sum(each.nbytes for each in model.parameters())
