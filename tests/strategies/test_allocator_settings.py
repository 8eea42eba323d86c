"""The allocator strategy: what torch is told, when, and that it is taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.zoo.small_jobs import session_of

import memfit
from memfit import Plan
from memfit.errors import StrategyError
from memfit.prediction.recording import record
from memfit.strategies import allocator_settings, build_strategy
from memfit.strategies.allocator_settings import AllocatorConf
from memfit.units import MIB

GROWING = AllocatorConf(conf="expandable_segments:True")


@pytest.fixture
def gpu_session(regression_job, monkeypatch):
    """Return a session that takes itself to be on a GPU, on which nothing else lies."""
    session = session_of(regression_job)
    session.device_type = "cuda"
    calls = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [_segment(900, grows=False)])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty cache"))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")
    return session, calls


def _segment(active_mib, *, grows):
    return {"active_size": active_mib * MIB, "is_expandable": grows}


def test_torch_is_told_and_the_cache_given_back(gpu_session):
    session, calls = gpu_session
    undo = GROWING.apply(session)
    assert calls == ["expandable_segments:True", "empty cache"]
    undo()
    assert calls[2:] == ["expandable_segments:False", "empty cache"]


def test_what_was_set_before_is_replaced_and_put_back(gpu_session, monkeypatch):
    session, calls = gpu_session
    before = "expandable_segments:True,max_split_size_mb:64"
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: before)
    undo = AllocatorConf(conf="large_segment_size_mb:40").apply(session)
    undo()
    assert calls[::2] == [
        "large_segment_size_mb:40,expandable_segments:False",
        f"{before},large_segment_size_mb:20",
    ]


def test_torch_itself_takes_the_texts(regression_job, monkeypatch):
    session = session_of(regression_job)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    before = torch._C._accelerator_getAllocatorSettings()
    undo = GROWING.apply(session)
    assert torch._C._accelerator_getAllocatorSettings() == GROWING.conf
    undo()
    after = torch._C._accelerator_getAllocatorSettings()
    assert after.replace("expandable_segments:False", "") == before


def test_what_is_set_already_is_left_alone(gpu_session, monkeypatch):
    session, calls = gpu_session
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: GROWING.conf)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 900 * MIB)
    GROWING.apply(session)()
    assert calls == []


def test_a_torch_that_cannot_be_asked_has_what_it_was_told_or_started_with(
    gpu_session, monkeypatch
):
    """Torch 2.11 sets the allocator's settings, and does not give them."""
    session, calls = gpu_session
    monkeypatch.setattr(allocator_settings, "_told", [])
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", GROWING.conf)
    GROWING.apply(session)()
    assert calls == []
    undo = AllocatorConf(conf="max_split_size_mb:64").apply(session)
    undo()
    GROWING.apply(session)()
    assert calls[::2] == ["max_split_size_mb:64,expandable_segments:False", GROWING.conf]


def test_it_is_too_late_when_other_work_lies_on_the_gpu(gpu_session, monkeypatch):
    session, calls = gpu_session
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 900 * MIB)
    with pytest.raises(StrategyError, match=r"too late: 900.* MiB .*PYTORCH_ALLOC_CONF=expandable"):
        GROWING.apply(session)
    assert calls == []


def test_an_earlier_run_in_segments_that_grow_is_not_in_the_way(gpu_session, monkeypatch):
    """Training measures one step of its own when it is done, beside what it trained."""
    session, calls = gpu_session
    segments = [_segment(880, grows=True), _segment(20, grows=False)]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 900 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    GROWING.apply(session)
    assert calls == [GROWING.conf, "empty cache"]
    segments += [_segment(70, grows=False)]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 970 * MIB)
    with pytest.raises(StrategyError, match=r"too late: 90.* MiB"):
        GROWING.apply(session)


def test_the_models_own_parameters_are_no_other_work(gpu_session, monkeypatch):
    session, calls = gpu_session
    session.model.register_buffer("table", torch.empty(100 * MIB, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 101 * MIB)
    GROWING.apply(session)
    assert calls


def test_what_torch_refuses_is_said_with_the_way_out(gpu_session, monkeypatch):
    def refuse(_conf):
        raise RuntimeError("not on this platform.\nand a traceback")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    with pytest.raises(StrategyError, match=r"\(not on this platform\)\. Start the program with"):
        GROWING.apply(gpu_session[0])


@pytest.mark.slow
def test_recording_tells_torch_nothing(regression_job, monkeypatch):
    def refuse(*_):
        raise AssertionError("the allocator was touched")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    plan = Plan(strategies=(GROWING,))
    assert memfit.predict(regression_job, "a100-40gb", plan).strategies == (
        "allocator-settings(expandable_segments:True)",
    )


@pytest.mark.parametrize(
    "conf",
    ["", "expandable", "expandable_segments:1", "max_split_size_mb:1", "backend:native",
     "per_process_memory_fraction:0.5", "expandable_segments:True,pinned_num_register_threads:2"],
)  # fmt: skip
def test_other_texts_are_refused(conf):
    with pytest.raises(StrategyError, match=r"conf must hold|needed is"):
        build_strategy("allocator-settings", {"conf": conf})


def test_it_is_offered_on_gpus_alone(regression_job):
    facts = record(regression_job).facts
    assert list(AllocatorConf.options(facts)) == []
    assert list(AllocatorConf.options(replace(facts, device_type="cuda"))) == [GROWING]
