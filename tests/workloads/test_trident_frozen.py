"""Training around frozen branches is training the whole model with them frozen, without them."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.workloads.training import press_ctrl_c_in_step, train_workload

import memfit
from memfit.errors import DataError, MemfitError, NoPlanFitsError, UsageError
from memfit_workloads.epochs import load_checkpoint
from memfit_workloads.trident import embedding_cache, frozen_branches, model
from memfit_workloads.trident.branches import BRANCHES, BranchSettings
from memfit_workloads.trident.clips import collate
from memfit_workloads.trident.embedding_cache import CachedClips, EmbeddingCache
from memfit_workloads.trident.evaluation import answers_for
from memfit_workloads.trident.frozen_branches import (
    frozen_branches as build_branches,
)
from memfit_workloads.trident.frozen_branches import (
    job_on_embeddings,
    job_with_frozen_branches,
    without_targets,
)
from memfit_workloads.trident.frozen_training import FrozenTraining
from memfit_workloads.trident.generated import GeneratedClips
from memfit_workloads.trident.job import StepSettings, build_job
from memfit_workloads.trident.model import build_model
from memfit_workloads.trident.reading import ClipReader
from memfit_workloads.trident.sizes import DEMO, DOCUMENT
from memfit_workloads.trident.sources import Splits

SMALL = replace(DEMO, height=16, width=16)
SUBSETS = [("rgb",), ("rgb", "infrared"), BRANCHES, ("kinematics",)]
FLAGS = (
    *("--synthetic", "--num-clips", "24", "--num-valid-clips", "8", "--num-test-clips", "8"),
    *("--num-frames", "8", "--height", "16", "--width", "16", "--no-gpu"),
)
PLAN = "memfit_plan: 1\nstrategies:\n- {name: micro-batching, micro_batch_size: 2}\n"


@pytest.fixture
def in_double(monkeypatch):
    """Have frames and motions become float64, as the weights of the proof are."""
    scale = {"kinematics": 1.0}

    def as_inputs(branch, readings):
        return readings.double() / scale.get(branch, 255.0)

    for module in (model, frozen_branches):
        monkeypatch.setattr(module, "as_inputs", as_inputs)


def cached(folder: Path, frozen: tuple[str, ...], clips: GeneratedClips, size: int) -> CachedClips:
    """Embed clips in batches of another size than training has, in float64."""
    branches = build_branches(clips.sizes, frozen, seed=0, checkpoint=None).double()
    cache = EmbeddingCache(folder=folder, branches=branches, sizes=clips.sizes)
    path = cache.path("train", clips)
    batches = (
        {**batch, **branches.embed(batch)}
        for begin in range(0, len(clips), size)
        for batch in [collate(clips, range(begin, min(begin + size, len(clips))))]
    )
    cache.write(path, len(clips), batches)
    records = cache.opened(path, len(clips))
    assert records is not None
    rest = None if cache.holds_all else clips
    return CachedClips(records=records, clips=rest, frozen=frozen)


def trained(job, batches) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train in float64; return losses, the gradients of the first step, and weights."""
    own = job.model().double()
    optimizer = job.optimizer(own.parameters())
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for batch in batches:
        optimizer.zero_grad()
        loss = job.loss(own, batch)
        loss.backward()
        first = first or {
            name: each.grad.clone() for name, each in own.named_parameters() if each.requires_grad
        }
        torch.nn.utils.clip_grad_norm_(own.parameters(), job.clip_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, first, {name: each.detach() for name, each in own.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", SUBSETS, ids=" ".join)
def test_loss_gradients_and_weights_after_three_epochs_are_those_of_the_whole_model(
    tmp_path, in_double, frozen
):
    clips = GeneratedClips(sizes=SMALL, num_clips=6, seed=1)
    read = cached(tmp_path, frozen, clips, size=4)
    job = build_job(SMALL, StepSettings(batch_size=3))
    order = [torch.randperm(6, generator=torch.Generator().manual_seed(e)) for e in range(3)]
    rows = [part.tolist() for each in order for part in each.split(3)]
    ours = trained(job_on_embeddings(job, SMALL, frozen), map(read, rows))
    theirs = trained(
        job_with_frozen_branches(job, frozen),
        (without_targets(collate(clips, each), frozen) for each in rows),
    )
    assert ours[0] == pytest.approx(theirs[0], rel=1e-10)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert torch.allclose(ours[1][name], gradient, rtol=1e-10, atol=1e-12), name
    start = build_model(SMALL, 0).state_dict()
    for name, weight in ours[2].items():
        assert torch.allclose(weight, theirs[2][name], rtol=1e-10, atol=1e-12), name
        assert not torch.equal(weight, start[name].double()), name
    still = {name for name in theirs[2] if name not in ours[2]}
    assert {name.partition(".")[0] for name in still} == set(frozen)


def test_the_targets_of_frozen_branches_give_no_gradient_to_the_rest():
    job = build_job(SMALL, StepSettings(batch_size=2))
    clips = GeneratedClips(sizes=SMALL, num_clips=2, seed=1)
    own = job_with_frozen_branches(job, ("rgb", "infrared")).model()
    whole = collate(clips, range(2))
    found = []
    for batch in (whole, without_targets(whole, ("rgb", "infrared"))):
        own.zero_grad()
        job.loss(own, batch).backward()
        found.append([each.grad for each in own.parameters() if each.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("frames", [(8, 16, 16), (11, 30, 22)])
def test_an_embedding_alone_is_that_of_the_whole_branch_to_the_bit(frames):
    names = ("num_frames", "height", "width")
    sizes = replace(DEMO, **dict(zip(names, frames, strict=True)))
    branches = build_branches(sizes, BRANCHES, seed=3, checkpoint=None)
    batch = collate(GeneratedClips(sizes=sizes, num_clips=2, seed=0), range(2))
    with torch.no_grad():
        whole = build_model(sizes, 3)(batch).embeddings
    for name, found in branches.embed(batch).items():
        assert torch.equal(found, whole[name.removesuffix("_embedding")])


def settings_for(folder: Path, sizes=SMALL, plan_file=None, **memory: Any) -> Any:
    """Return what frozen training asks of settings."""
    from memfit_workloads.memory_settings import MemorySettings

    told = {"device": "cpu", "budget_bytes": None, "budget_fraction": None, **memory}
    return SimpleNamespace(
        sizes=sizes,
        branches=BranchSettings(frozen=("rgb", "infrared")),
        random_seed=0,
        output_dir=folder,
        micro_batch_size=None,
        memory_settings=MemorySettings(**told, allow=(), require=(), plan_file=plan_file),
    )


def frozen_training(settings: Any, num_clips: int = 8) -> FrozenTraining:
    clips = [GeneratedClips(sizes=settings.sizes, num_clips=num_clips, seed=s) for s in range(3)]
    job = build_job(settings.sizes, StepSettings(batch_size=4))
    splits = Splits(train=clips[0], valid=clips[1], test=clips[2], identity="generated")
    return FrozenTraining(settings, job, splits)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(PLAN)
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, plan_file) -> tuple[Any, Any, FrozenTraining]:
    """Return a budget that four clips at a time do not fit, and what is computed in it."""
    # 16 channels: the CPU's kernels take narrower images in ways that depend on the processor.
    sizes = replace(DEMO, video_channels=16)
    roomy = settings_for(tmp_path_factory.mktemp("run"), sizes, plan_file)
    whole = frozen_training(roomy)._predicted_embedding("cpu", 4)
    settings = replace_budget(roomy, whole.peak_allocated_bytes - 1)
    training = frozen_training(settings)
    planned = training.plan(settings)
    training.prepare(settings, planned)
    return planned, settings, training


def replace_budget(settings: Any, budget_bytes: int) -> Any:
    memory = replace(settings.memory_settings, budget_bytes=budget_bytes)
    return SimpleNamespace(**{**vars(settings), "memory_settings": memory})


@pytest.mark.slow
def test_embedding_takes_what_was_predicted_inside_the_budget(prepared):
    planned, settings, training = prepared
    measured = training.measured_embedding_peak_bytes
    assert planned.embedding_batch_size == 2
    assert measured <= settings.memory_settings.budget_bytes
    assert planned.embedding.peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    measured = memfit.measure(training.job, planned.plan)
    assert planned.planned.peak_allocated_bytes == pytest.approx(
        measured.peak_allocated_bytes, rel=0.01
    )
    assert planned.to_json()["numerics"] == "different"
    assert planned.plain.peak_allocated_bytes > 5 * planned.planned.peak_allocated_bytes


@pytest.mark.slow
def test_what_is_there_is_used_again_and_what_is_damaged_or_of_other_weights_is_not(
    prepared, monkeypatch
):
    planned, settings, _ = prepared
    monkeypatch.setattr(
        frozen_branches.FrozenBranches, "embed", lambda *_: pytest.fail("embedded again")
    )
    again = frozen_training(settings)
    assert all("are there" in line for line in again.prepare(settings, planned))
    assert again.measured_embedding_peak_bytes is None
    monkeypatch.undo()
    files = sorted((settings.output_dir / "embeddings").glob("*.npy"))
    assert [path.name.partition("-")[0] for path in files] == ["test", "train", "valid"]
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-5])
    assert sum("embedded" in line for line in again.prepare(settings, planned)) == 1
    assert files[1].read_bytes() == whole
    other = SimpleNamespace(**{**vars(settings), "random_seed": 5})
    assert all("embedded" in line for line in frozen_training(other).prepare(other, planned))
    assert not any(path.exists() for path in files), "of weights that are not used any more"


@pytest.mark.slow
def test_one_clip_that_does_not_fit_is_an_error_with_a_remedy(tmp_path):
    settings = settings_for(tmp_path, budget_bytes=2**19)
    with pytest.raises(NoPlanFitsError, match=r"embedding one clip.*--height"):
        frozen_training(settings).plan(settings)


def records_of(folder: Path) -> tuple[EmbeddingCache, Path, Any]:
    clips = GeneratedClips(sizes=SMALL, num_clips=2, seed=1)
    branches = build_branches(SMALL, BRANCHES, seed=0, checkpoint=None)
    cache = EmbeddingCache(folder=folder, branches=branches, sizes=SMALL)
    batch = collate(clips, range(2))
    return cache, cache.path("train", clips), {**batch, **branches.embed(batch)}


def test_a_full_disk_names_the_file_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    cache, path, batch = records_of(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(embedding_cache.np.lib.format, "write_array_header_2_0", full)
    with pytest.raises(DataError, match=r"train-\w+\.npy.*No space left on the disk"):
        cache.write(path, 2, iter([batch]))
    assert list(path.parent.iterdir()) == []


def test_fewer_clips_than_were_announced_are_not_taken_for_all(tmp_path):
    cache, path, batch = records_of(tmp_path)
    cache.write(path, 3, iter([batch]))
    assert cache.opened(path, 3) is None


def test_a_fingerprint_depends_on_weights_clips_and_sizes(tmp_path):
    clips = GeneratedClips(sizes=SMALL, num_clips=2, seed=1)
    wide = replace(SMALL, width=32)

    def path(cache_sizes=SMALL, clips=clips, seed=0, frozen=("rgb",)):
        branches = build_branches(cache_sizes, frozen, seed=seed, checkpoint=None)
        return EmbeddingCache(folder=tmp_path, branches=branches, sizes=cache_sizes).path(
            "train", clips
        )

    others = [
        path(seed=1),
        path(clips=replace(clips, num_clips=3)),
        path(clips=replace(clips, seed=2)),
        path(wide, replace(clips, sizes=wide)),
        path(frozen=("rgb", "kinematics")),
    ]
    assert len({path(), *others}) == 6
    assert path() == path()


@pytest.mark.slow
def test_an_embedding_that_is_no_number_names_the_clip(prepared, tmp_path):
    planned, settings, _ = prepared
    elsewhere = SimpleNamespace(**{**vars(settings), "output_dir": tmp_path})
    training = frozen_training(elsewhere)
    with torch.no_grad():
        training.branches["rgb"].flash.embed.bias[0] = np.nan
    with pytest.raises(MemfitError, match="rgb_embedding of clip 0"):
        training.prepare(elsewhere, planned)
    assert not list(tmp_path.rglob("*.npy"))


@pytest.mark.slow
def test_at_the_document_s_size_a_step_of_the_rest_takes_less_than_a_quarter_of_a_gigabyte():
    job = build_job(DOCUMENT, StepSettings(batch_size=16))
    found = memfit.predict(job_on_embeddings(job, DOCUMENT, BRANCHES[:2]), "a100-40gb")
    assert found.peak_allocated_bytes < 2**28
    assert found.fits


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--freeze-from", "best_model.pt"), "--freeze-branches"),
        (("--freeze-branches", "rgb", "--freeze-from", "none.pt"), r"none\.pt.*--freeze-from"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(tmp_path, words, message):
    with pytest.raises((UsageError, DataError), match=message):
        train_workload("trident", (*FLAGS, *words, "-o", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_is_refused_by_the_weight(tmp_path):
    torch.save({"model_state_dict": build_model(SMALL, 0).state_dict()}, tmp_path / "it.pt")
    other = replace(SMALL, video_channels=16)
    with pytest.raises(DataError, match=r"rgb\.video.*is needed"):
        build_branches(other, ("rgb",), seed=0, checkpoint=tmp_path / "it.pt")
    found = build_branches(SMALL, ("rgb",), seed=7, checkpoint=tmp_path / "it.pt")
    assert (
        found.fingerprint()
        == build_branches(SMALL, ("rgb",), seed=0, checkpoint=None).fingerprint()
    )


def train(*words: object, console: Console | None = None) -> dict[str, Any]:
    return train_workload("trident", (*FLAGS, "--freeze-branches", "rgb", "infrared", *words),
                          console)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, plan_file) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, train("--epochs", "2", "--plan", plan_file, "-o", folder)


@pytest.mark.slow
def test_a_run_says_that_it_is_another_problem_and_its_model_is_whole(run):
    folder, result = run
    config = json.loads((folder / "config.json").read_text())
    for told in (result, config["memory"]):
        assert told["numerics"] == "different"
        assert told["frozen_branches"] == ["rgb", "infrared"]
    assert result["measured_peak_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.01)
    best = load_checkpoint(folder / "best_model.pt", "TRIDENT-Net")
    whole = build_model(SMALL, 42)
    start = {name: value.clone() for name, value in whole.state_dict().items()}
    whole.load_state_dict(best["model_state_dict"])
    moved = {name for name, value in whole.state_dict().items() if not value.equal(start[name])}
    assert {name.partition(".")[0] for name in moved} == {"kinematics", "object_class", "fusion"}
    reader = ClipReader(GeneratedClips(sizes=SMALL, num_clips=8, seed=2))
    answers = answers_for(whole, reader, 8)
    brier = float((answers.event - answers.true_event).square().mean())
    assert result["metrics"]["test_event_brier"] == pytest.approx(brier, rel=1e-4)


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_exactly_without_a_frame(
    run, plan_file, tmp_path, monkeypatch
):
    folder = tmp_path / "parts"
    words = ("--epochs", "2", "--plan", plan_file, "-o", folder)
    with monkeypatch.context() as patch:
        press_ctrl_c_in_step(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            train(*words)
    with monkeypatch.context() as patch:
        patch.setattr(GeneratedClips, "clip", lambda *_: pytest.fail("a frame was read"))
        train(*words, "--resume-from-checkpoint", "auto")
    ours, theirs = (
        load_checkpoint(each / "final_model.pt", "TRIDENT-Net")["model_state_dict"]
        for each in (folder, run[0])
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_run_is_not_continued_with_other_branches_frozen(run, plan_file):
    flags = (*FLAGS, "--epochs", "3", "--plan", plan_file, "-o", run[0])
    resume = ("--resume-from-checkpoint", run[0] / "final_model.pt")
    for frozen in ((), ("--freeze-branches", "rgb")):
        with pytest.raises(UsageError, match="frozen_branches"):
            train_workload("trident", (*flags, *resume, *frozen))
