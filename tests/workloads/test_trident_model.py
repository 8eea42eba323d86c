"""The branches have the document's sizes, and everything that learns is registered."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from memfit_workloads.trident import attention as attention_module
from memfit_workloads.trident.attention import SelfAttention
from memfit_workloads.trident.clips import blank_batch
from memfit_workloads.trident.fusion import CrossAttnFusion
from memfit_workloads.trident.generated import GeneratedClips
from memfit_workloads.trident.job import StepSettings, build_job
from memfit_workloads.trident.kine_feat import KineFeat
from memfit_workloads.trident.losses import batch_loss
from memfit_workloads.trident.model import TridentNet, build_model, curves_of
from memfit_workloads.trident.sizes import DEMO, DOCUMENT, TridentSizes

# Millions, of the document's own implementation; FlashNet-V is none of them.
DOCUMENTED = {
    "rgb.video": 3.02,
    "rgb.vision": 2.0,
    "infrared.detector": 1.11,
    "infrared.curves": 0.18,
    "kinematics.geometry": 0.05,
    "kinematics.tempo": 1.04,
    "fusion": 11.06,
    "": 18.5,
}


@pytest.fixture(scope="module")
def document_model() -> TridentNet:
    with torch.device("meta"):
        return TridentNet(DOCUMENT)


def num_weights(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(("name", "millions"), DOCUMENTED.items())
def test_each_branch_is_as_large_as_documented(document_model, name, millions):
    found = num_weights(document_model.get_submodule(name)) / 1e6
    assert found == pytest.approx(millions, rel=0.03)


def test_nothing_is_created_in_forward():
    model = build_model(DEMO, 0)
    before = {name: id(each) for name, each in model.named_parameters()}
    loss = batch_loss(model(batch := blank_batch(DEMO, 2)), batch)
    assert {name: id(each) for name, each in model.named_parameters()} == before
    assert {"rgb.vision.position", "kinematics.tempo.position", "fusion.modality"} <= set(before)
    loss.backward()
    without = [name for name, each in model.named_parameters() if each.grad is None]
    assert not without


def test_the_optimizer_has_every_weight():
    job = build_job(DEMO, StepSettings(batch_size=2))
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert held == {id(each) for each in model.parameters()}


@pytest.mark.slow
def test_every_weight_moves_in_a_step():
    job = build_job(DEMO, StepSettings(batch_size=4, weight_decay=0.0))
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    clips = GeneratedClips(sizes=DEMO, num_clips=8, seed=0)
    from memfit_workloads.trident.clips import collate

    job.loss(model, collate(clips, range(8))).backward()
    optimizer.step()
    still = [name for name, each in model.named_parameters() if torch.equal(each, before[name])]
    assert not still


def test_no_layer_couples_samples():
    model = build_model(DEMO, 0)
    assert not [
        each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)
    ]
    batch = blank_batch(DEMO, 3)
    batch["rgb"].random_(0, 255)
    with torch.no_grad():
        together = model(batch).outcomes.event
        alone = [
            model({name: part[row : row + 1] for name, part in batch.items()}).outcomes.event
            for row in range(3)
        ]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("frames", [(8, 17, 23), (11, 30, 22), (9, 16, 50)])
def test_odd_sides_go_through_and_masks_have_the_size_of_the_clip(frames):
    names = ("num_frames", "height", "width")
    sizes = dataclasses.replace(DEMO, **dict(zip(names, frames, strict=True)))
    model = build_model(sizes, 0)
    answer = model(batch := blank_batch(sizes, 2))
    assert answer.mask_logits.shape == (2, frames[0], 1, *frames[1:])
    batch_loss(answer, batch).backward()


def test_attention_is_that_of_torch_with_the_same_weights(monkeypatch):
    torch.manual_seed(0)
    own, theirs = SelfAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    state = {
        name.replace("in_proj_", "query_key_value."): value
        for name, value in theirs.state_dict().items()
    }
    own.load_state_dict(state)
    tokens = torch.randn(3, 5, 16)
    calls = []
    fused = attention_module.F.scaled_dot_product_attention
    monkeypatch.setattr(
        attention_module.F,
        "scaled_dot_product_attention",
        lambda *parts: calls.append(1) or fused(*parts),
    )
    expected, _ = theirs(tokens, tokens, tokens)
    assert torch.allclose(own(tokens), expected, atol=1e-6)
    assert calls, "attention has to go through torch's fused one"
    assert (
        len([each for each in build_model(DEMO, 0).modules() if isinstance(each, SelfAttention)])
        == 6
    )


def test_the_motion_s_features_are_those_of_their_definition():
    motion = torch.randn(2, 3, 9, dtype=torch.float64) * 100
    flat, tokens = KineFeat()(motion)
    assert flat.shape == (2, 69)
    assert tokens.shape == (2, 3, 32)
    fixed = flat[:, 45:]
    position, velocity = motion[..., :3] / 1000, motion[..., 3:6] / 100
    distance = position.norm(dim=-1)
    radial = (position * velocity).sum(dim=-1) / distance
    lateral = (velocity - radial[..., None] * position / distance[..., None]).norm(dim=-1)
    acceleration = velocity.diff(dim=1)
    expected = [
        distance, (motion[..., 6] / 1000).diff(dim=1), radial, motion[..., 7].diff(dim=1),
        motion[..., 8].diff(dim=1), lateral, acceleration.flatten(1),
        acceleration.diff(dim=1).flatten(1),
    ]  # fmt: skip
    assert [each.shape[1] for each in expected] == [3, 2, 3, 2, 2, 3, 6, 3]
    assert torch.allclose(fixed, torch.cat(expected, dim=1), atol=1e-6)


def test_a_motion_that_stands_still_has_finite_gradients():
    motion = torch.zeros(1, 3, 9, requires_grad=True)
    sum(each.sum() for each in KineFeat()(motion)).backward()
    assert torch.isfinite(motion.grad).all()


def test_curves_are_read_at_the_likeliest_cells():
    model = build_model(DEMO, 0)
    maps = model.infrared.detector(torch.zeros(1, 1, 8, 32, 32)).maps
    heatmap = torch.full_like(maps.heatmap, -9.0)
    heatmap[..., 3, 5] = 9.0
    clip = torch.zeros(1, 1, 8, 32, 32)
    clip[:, :, :, 13, 21] = torch.linspace(1.0, 0.3, 8)
    curves = curves_of(
        maps._replace(heatmap=heatmap, intensity=torch.zeros_like(maps.intensity)), clip
    )
    assert curves.shape == (1, 10, 3)
    assert torch.allclose(curves[0, 0], 0.5 * torch.linspace(1.0, 0.3, 8)[[1, 4, 6]])


def test_a_severe_event_is_never_likelier_than_an_event():
    fusion = CrossAttnFusion(DEMO)
    with torch.no_grad():
        for head, bias in ((fusion.event, -5.0), (fusion.severe, 5.0)):
            head[-1].bias.fill_(bias)
    dims = (DEMO.image_dim, DEMO.thermal_dim, DEMO.motion_dim, DEMO.class_dim)
    names = ("rgb", "infrared", "kinematics", "class")
    outcomes = fusion({name: torch.randn(4, dim) for name, dim in zip(names, dims, strict=True)})
    assert (outcomes.severe_alone > outcomes.event).all()
    assert torch.equal(outcomes.severe, outcomes.event)


def test_weights_depend_on_the_seed_and_leave_the_random_state_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (build_model(DEMO, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fusion.modality"], other["fusion.modality"])


def test_sizes_survive_being_written_and_read():
    assert TridentSizes.from_json(DEMO.to_json()) == DEMO
