"""Steps are recorded in order, once, in whole rows that can be rebuilt; failures end nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import record_gpu
import torch
from accuracy import models as building
from accuracy import rebuild as rebuilding
from accuracy import rows
from recording import matrix, models, processes, rowfile, runner
from recording import measure as measuring
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

ROWS_CHANGED = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")

ENTRIES = matrix.all_entries()
OWN = [entry for entry in ENTRIES if entry.about.library == "custom"]
CARD = "NVIDIA H200"


# --- the list --------------------------------------------------------------------------------------


def test_the_list_is_long_enough_with_and_without_other_packages():
    assert len(ENTRIES) >= 64
    assert len({entry.workload for entry in ENTRIES}) >= 20
    assert len(OWN) >= 60
    assert len({entry.workload for entry in OWN}) >= 12
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entries", [ENTRIES, OWN], ids=["all", "torch alone"])
def test_every_axis_is_covered_several_times(entries):
    for field, values in {
        "precision": matrix.PRECISIONS,
        "allocator": matrix.ALLOCATORS,
        "recomputes": (False, True),
        "accumulation_steps": (1, 4),
    }.items():
        found = Counter(getattr(entry, field) for entry in entries)
        assert set(found) == set(values), field
        assert min(found.values()) >= 4, found
    optimizers = Counter(entry.optimizer for entry in ENTRIES)
    assert set(optimizers) == set(matrix.OPTIMIZERS)
    assert min(optimizers[name] for name in ("adamw", "adamw-fused", "sgd", "adamw-loop")) >= 2


def test_about_half_of_the_rows_are_held_out_and_an_id_decides():
    found = Counter(matrix.split_of(rowfile.row_id(CARD, entry)) for entry in ENTRIES)
    assert set(found) == {"development", "held-out"}
    assert 0.4 < found["held-out"] / len(ENTRIES) < 0.6
    assert [matrix.split_of(name) for name in ("a", "memfit-h200-a")] == ["development", "held-out"]


def test_only_models_that_can_recompute_are_asked_to():
    assert all(entry.about.recomputes for entry in ENTRIES if entry.recomputes)


def test_an_entry_of_a_missing_package_is_left_out(monkeypatch):
    monkeypatch.setattr(matrix, "_is_installed", lambda library: library == "custom")
    assert list(matrix.possible_entries(ENTRIES)) == OWN


def test_snapshots_are_kept_of_entries_that_exist():
    assert len(matrix.snapshot_names(ENTRIES, 6)) == 6
    assert set(matrix._SNAPSHOTS) <= {entry.name for entry in ENTRIES}


# --- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_is_a_row_that_is_read_back(entry):
    row = rows.parse_row(json.loads(json.dumps(rowfile.unmeasured_row(entry, CARD, "abc"))))
    assert row.id == f"memfit-h200-{entry.name}"
    assert row.source == "memfit-recorded"
    assert row.accumulation_steps == entry.accumulation_steps
    assert row.split in {"development", "held-out"}
    assert (row.gradient_checkpointing is not None) == entry.recomputes


@pytest.mark.parametrize("workload", sorted({entry.workload for entry in OWN}))
def test_an_architecture_of_torch_alone_can_be_built_from_its_row(workload):
    entry = next(entry for entry in OWN if entry.workload == workload)
    row = rows.parse_row(rowfile.unmeasured_row(entry, CARD, None))
    total, trained = building.count_parameters(row)
    assert total == trained > 10_000
    model_name = row.constructor["call"].split("'")[1]
    assert model_name in models.MODELS


def small_row(name: str, sizes: str, batch: int, shapes: dict[str, list[int]] | None = None):
    """Return the row of an entry with a smaller model and batch."""
    entry = next(entry for entry in OWN if entry.name == name)
    fields = rowfile.unmeasured_row(entry, "cpu", None)
    call = fields["constructor"]["call"].split("'")[1]
    constructor = fields["constructor"] | {"call": f"recording.models.build('{call}', {sizes})"}
    inputs = [
        each | {"shape": (shapes or {}).get(each["name"]) or [batch, *each["shape"][1:]]}
        for each in fields["input"]
    ]
    return rows.parse_row(fields | {"constructor": constructor, "input": inputs})


SMALL = {
    "mlp": ("mlp-b2048-fp32-adafactor-acc4", "width=16, depth=2, num_classes=5", 3, None),
    "recomputed": ("mlp-b4096-bf16-sgd-ckpt", "width=16, depth=2, num_classes=5", 3, None),
    "adversaries": ("gan-b256-amp-adam", "width=2, latent=4", 2, None),
    "autoencoder": ("vae-b512-amp-adamw-fused-acc4", "width=4, latent=8", 2, None),
    "recurrent": ("lstm-b64-amp-adamw-roundup", "width=8, vocabulary=11", 2, {"x": [2, 5], "target": [2, 5]}),
    "unet": ("unet-b16-fp32-adam", "width=8, depth=2", 1, {"x": [1, 3, 8, 8], "target": [1, 3, 8, 8]}),
    "decoder": (
        "decoder-gqa-b8-amp-adamw-fused-ckpt-acc4-expandable",
        "width=256, depth=2, vocabulary=13, modern=True",
        1,
        {"x": [1, 6], "target": [1, 6]},
    ),
    "graph": ("graph-b400000-fp32-adamw", "nodes=7, width=4", 1, {"x": [2, 9], "target": [7]}),
    "recommender": ("recommender-b8192-amp-adagrad-acc4", "entries=9, tables=4", 3, None),
    "towers": ("towers-b4096-fp32-adamw", "width=8", 3, None),
}  # fmt: skip


def trains_lstms_in_bf16():
    """Return whether this processor can train an LSTM in bfloat16, which older ones cannot."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.nn.LSTM(8, 8)(torch.randn(2, 2, 8))[0].sum().backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("case", SMALL)
def test_a_small_step_runs_and_trains_every_parameter(case):
    if case == "recurrent" and not trains_lstms_in_bf16():
        pytest.skip("this processor trains no LSTM in bfloat16")
    row = small_row(*SMALL[case])
    torch.manual_seed(0)
    updated = []
    step = rebuilding.rebuild(row, "cpu").setup()
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: updated.append(optimizer))
    try:
        step()
    finally:
        handle.remove()
    assert len(updated) == len(row.constructor.get("turns", ["all"]))
    groups = [group for optimizer in updated for group in optimizer.param_groups]
    assert all(each.grad is not None for group in groups for each in group["params"])


def test_accumulated_batches_give_the_gradient_of_their_mean():
    gradients = []
    for number in (1, 4):
        each = rows.parse_row(
            {
                **rowfile.unmeasured_row(OWN[3], "cpu", None),
                "constructor": {
                    "call": "recording.models.build('towers', width=8)",
                    "train_mode": False,
                },
                "input": [
                    {"name": "x", "shape": [3, 1024], "dtype": "float32"},
                    {"name": "y", "shape": [3, 1024], "dtype": "float32"},
                ],
                "loss": "model(x, y).mean()",
                "accumulation_steps": number,
            }
        )
        seen = []
        torch.manual_seed(0)
        step = rebuilding.rebuild(each, "cpu").setup()
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_, seen=seen: seen.extend(
                parameter.grad.clone() for parameter in optimizer.param_groups[0]["params"]
            )
        )
        try:
            step()
        finally:
            handle.remove()
        gradients.append(seen)
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


# --- measuring -------------------------------------------------------------------------------------


class FakeCard:
    """A card that writes down what it is asked, and on which a step takes known bytes."""

    device = "cuda"
    out_of_memory = (MemoryError,)

    def __init__(self, fails_in: int | None = None):
        self.calls, self.num_steps, self.fails_in = [], 0, fails_in
        self.peak = self.now = 0

    def start(self):
        self.calls.append("start")

    def wait(self):
        self.calls.append("wait")

    def allocated_bytes(self):
        return self.now

    def reserved_bytes(self):
        return self.now + 10

    def peaks(self):
        return self.peak, self.peak + 10

    def reset_peaks(self):
        self.calls.append("reset")
        self.peak = self.now

    def take(self, num_bytes):
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def process(self):
        return measuring.ProcessReading(
            process_bytes=self.reserved_bytes() + 500, source="fake", every_way={"fake_bytes": 1}
        )

    def further(self):
        return {"retries": 0}

    def record_history(self):
        self.calls.append("record")

    def save_history(self, path):
        self.calls.append(f"save {path}")

    def seconds(self, step):
        step()
        return 0.5 + self.num_steps

    def place(self, device, watch):
        """Return a step: forward takes 100 bytes, backward 50 more, optimizer state stays."""
        assert device == "cuda"
        self.take(1000)

        def step():
            self.num_steps += 1
            self.calls.append("step")
            if self.num_steps == self.fails_in:
                raise MemoryError("tried to allocate 7 bytes")
            for _ in range(2):
                self.take(100)
                watch("forward")
                self.take(50)
                self.take(-150)
                watch("backward")
            self.take(400 if self.num_steps == 1 else 20)
            if self.num_steps > 1:
                self.take(-20)
            watch("optimizer")

        return step


def test_the_second_step_counts_and_phases_come_from_a_third():
    card = FakeCard()
    reading = measuring.measure(card.place, card)
    assert reading.outcome == "ok"
    assert reading.measured == {
        "allocated_bytes": 1550,
        "reserved_bytes": 1560,
        "process_bytes": 1910,
        "context_bytes": 500,
    }
    extra = reading.measured_extra
    assert extra["first_step_allocated_bytes"] == 1400
    assert extra["setup_allocated_bytes"] == 1000
    assert extra["context_after_init_bytes"] == 500
    assert [extra[f"phase_peak_{name}_bytes"] for name in ("forward", "backward", "optimizer")] == [
        1500,
        1550,
        1420,
    ]
    assert extra["step_seconds"] == 0.5 + 4
    assert "oom_in" not in extra
    assert card.calls[:7] == ["start", "wait", "step", "wait", "reset", "step", "wait"]


def test_a_snapshot_holds_the_steps_that_count_and_no_more(tmp_path):
    card = FakeCard()
    measuring.measure(card.place, card, tmp_path / "a.gz")
    saved = card.calls.index(f"save {tmp_path / 'a.gz'}")
    assert card.calls.index("record") < card.calls.index("step")
    assert card.calls[:saved].count("step") == 2


@pytest.mark.parametrize(("fails_in", "place"), [(1, "first step"), (2, "measured step")])
def test_running_out_of_memory_is_an_outcome(fails_in, place):
    card = FakeCard(fails_in)
    reading = measuring.measure(card.place, card)
    assert reading.outcome == "oom"
    assert set(reading.measured.values()) == {None}
    assert reading.measured_extra["oom_in"] == place
    assert "7 bytes" in reading.measured_extra["oom_text"]


def test_another_failure_is_not_taken_for_a_lack_of_memory():
    def broken(device, watch):
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        measuring.measure(broken, FakeCard())


# --- the recording ---------------------------------------------------------------------------------

RESULT = {
    "outcome": "ok",
    "measured": {"allocated_bytes": 5, "reserved_bytes": 6, "process_bytes": 7, "context_bytes": 1},
    "process_source": "fake",
    "measured_extra": {"step_seconds": 1.0},
    "fields": {"torch_version": "2.11.0", "params_total": 3},
}
PROBE = {
    "device": CARD,
    "device_total_bytes": 9,
    "driver_version": "580.1",
    "readings": {"context_bytes": 4, "cublas_workspace_bytes": 2},
}


class FakeChild:
    """A child that is ready, and over, when it is asked for the second time; broken ones never are."""

    def __init__(self, job, world):
        self.job, self.world, self.has_gone, self.is_ended = job, world, False, False
        self.is_broken = job.name in world.broken
        self.num_asked = self.num_asked_since = 0

    @property
    def holds_card(self):
        return self.has_gone and not self.is_ended and self.num_asked_since < 2

    def is_ready(self):
        self.num_asked += 1
        return not self.is_broken and self.num_asked > 1

    def go(self):
        assert self.num_asked > 1, "it was ready"
        assert not any(child.holds_card for child in self.world.children)
        self.has_gone = True
        self.world.order.append(self.job.name)
        self.world.now += self.world.row_seconds
        if self.job.name == self.world.interrupts_at:
            raise KeyboardInterrupt

    def has_ended(self):
        self.num_asked_since += self.has_gone
        return self.is_broken or self.is_ended or (self.has_gone and not self.holds_card)

    def result(self):
        assert not self.holds_card
        return None if self.is_broken else json.loads(json.dumps(RESULT))

    def complaint(self):
        return "exit code 1: Traceback\nValueError: broken"

    def end(self):
        self.is_ended = True


class World:
    """The children of a recording, and its clock."""

    def __init__(self, *, broken=(), row_seconds=1.0, interrupts_at=None):
        self.broken, self.row_seconds, self.interrupts_at = broken, row_seconds, interrupts_at
        self.children, self.order, self.now = [], [], 0.0

    def launch(self, job):
        self.children.append(FakeChild(job, self))
        return self.children[-1]

    def record(self, path, entries, **settings):
        recording = runner.Recording(
            rowfile.RowFile(path),
            self.launch,
            PROBE,
            runner.Settings(**settings),
            clock=lambda: self.now,
        )
        return recording.run(entries)


def test_rows_come_in_order_and_are_whole(tmp_path):
    world = World()
    outcome = world.record(tmp_path / "rows.jsonl", OWN[:6], revision="abc")
    assert (outcome.num_recorded, outcome.num_failed, outcome.num_left) == (6, 0, 0)
    assert world.order == [entry.name for entry in OWN[:6]]
    read = rows.read_rows(tmp_path / "rows.jsonl")
    assert [row.id for row in read] == [rowfile.row_id(CARD, entry) for entry in OWN[:6]]
    row = read[0]
    assert (row.measured.allocated_bytes, row.params_total, row.outcome) == (5, 3, "ok")
    assert (row.device, row.device_total_bytes, row.source_revision) == (CARD, 9, "abc")
    extra = row.measured_extra
    assert (extra["driver_version"], extra["allocator_name"]) == ("580.1", "default")
    assert (extra["probe_context_bytes"], extra["probe_cublas_workspace_bytes"]) == (4, 2)


def test_the_allocator_setting_and_the_snapshot_reach_the_child(tmp_path):
    world = World()
    entry = next(entry for entry in OWN if entry.allocator == "expandable")
    path = tmp_path / "a.pickle.gz"
    world.record(tmp_path / "rows.jsonl", [entry], snapshots={entry.name: path})
    job = world.children[0].job
    assert (job.allocator, job.snapshot) == ("expandable_segments:True", path)


def test_a_broken_entry_is_noted_and_the_next_one_follows(tmp_path):
    world = World(broken={OWN[1].name})
    outcome = world.record(tmp_path / "rows.jsonl", OWN[:3])
    assert (outcome.num_recorded, outcome.num_failed) == (2, 1)
    file = rowfile.RowFile(tmp_path / "rows.jsonl")
    assert file.failed_names() == {rowfile.row_id(CARD, OWN[1])}
    assert len(file.names()) == 2
    assert "ValueError: broken" in file.failures.read_text()


def test_no_entry_begins_that_could_pass_the_end(tmp_path):
    world = World(row_seconds=20.0)
    outcome = world.record(tmp_path / "rows.jsonl", OWN[:9], deadline=90.0)
    # 20 s each: one more begins only while at least 20 s are left.
    assert (outcome.num_recorded, outcome.num_left) == (4, 5)
    assert world.now <= 90.0
    assert all(child.is_ended for child in world.children)


def test_an_interrupt_ends_all_children_and_keeps_the_rows(tmp_path):
    world = World(interrupts_at=OWN[2].name)
    with pytest.raises(KeyboardInterrupt):
        world.record(tmp_path / "rows.jsonl", OWN[:8])
    assert all(child.is_ended for child in world.children)
    assert len(rows.read_rows(tmp_path / "rows.jsonl")) == 2


def test_a_probe_without_a_card_says_what_the_child_said():
    world = World(broken={"probe"})
    with pytest.raises(runner.ProbeError, match="ValueError: broken"):
        runner.probe_card(world.launch, runner.Settings(), lambda: 0.0)


def test_a_file_without_a_last_line_break_is_continued_on_a_new_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}')
    file = rowfile.RowFile(path)
    file.append({"id": "b"})
    assert file.names() == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "h200"), ("Tesla T4", "t4"), ("NVIDIA GeForce RTX 3060", "rtx-3060"), ("cpu", "cpu")],
)  # fmt: skip
def test_a_card_gives_its_name_to_the_file(name, slug):
    assert rowfile.card_slug(name) == slug


# --- processes -------------------------------------------------------------------------------------


def test_a_child_has_the_allocator_setting_of_its_entry_alone():
    parent = dict.fromkeys(ROWS_CHANGED, "x") | {"PATH": "p", "PYTHONPATH": "q"}
    found = processes.child_environment(parent, "expandable_segments:True")
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert not {*ROWS_CHANGED[1:]} & set(found)
    assert found["PATH"] == "p"
    assert found["PYTHONPATH"].split(os.pathsep)[-1] == "q"
    assert "PYTORCH_ALLOC_CONF" not in processes.child_environment(parent, None)


def test_a_child_that_hangs_is_ended(tmp_path):
    job = processes.Job(name="x", row={"not": "a row"}, device="cpu")
    child = processes.ChildProcess(job, tmp_path / "x")
    child.end()
    assert child.has_ended()
    assert child.result() is None


@pytest.mark.slow
def test_a_row_is_recorded_on_the_processor_and_then_skipped(tmp_path):
    out = tmp_path / "rows.jsonl"
    words = ["--device", "cpu", "--only", "tagger-b1024-fp32-adagrad", "--out", str(out)]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, record_gpu.__file__, *words]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        for _ in range(2)
    )
    assert "1 recorded, 0 failed" in first.stdout
    assert "0 recorded, 0 failed, 0 left, 1 were there" in second.stdout
    (row,) = rows.read_rows(out)
    assert row.measured.allocated_bytes is None
    assert row.measured_extra["step_seconds"] > 0
    assert row.params_total == 100_000 * 512 + 1024 + 512 * 50 + 50


@pytest.mark.slow
def test_an_interrupted_program_ends_its_children(tmp_path):
    out = tmp_path / "rows.jsonl"
    words = ["--device", "cpu", "--only", "decoder-*", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, record_gpu.__file__, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 60
    while not list(tmp_path.glob("memfit-record-*/*")) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run again to go on" in complaint
    assert not list(tmp_path.glob("memfit-record-*"))


def test_a_name_that_no_entry_has_is_refused(capsys):
    assert record_gpu.main(["--only", "nothing"]) == 1
    assert "--list" in capsys.readouterr().err


def test_the_list_can_be_narrowed(capsys):
    assert record_gpu.main(["--list", "--only", "gan-*"]) == 0
    assert capsys.readouterr().out.split() == ["gan-b128-fp32-adam", "gan-b256-amp-adam"]
