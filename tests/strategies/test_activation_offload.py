"""Activation offload: what is moved, when, and that it comes back as it was, over many steps."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.strategies.fake_streams import FakeCuda
from tests.zoo.living_jobs import mean_square
from tests.zoo.small_jobs import mean_square_job, session_of
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.errors import DataError, StrategyError
from memfit.prediction.recording import record
from memfit.runtime.planned_steps import apply_strategies
from memfit.runtime.run import open_plain_session, unguarded_run
from memfit.session.spill import Spill
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.activation_offload.host_copies import BufferPool, CopyStream
from memfit.strategies.activation_offload.host_storage import HostStorage, HostThenFileStorage
from memfit.strategies.activation_offload.spill_file import SpillFile
from memfit.strategies.bf16 import Bf16
from memfit.strategies.micro_batching import MicroBatching
from memfit.units import MIB

WIDTH = 16
FLOAT = 4
EVERYTHING = ActivationOffload(to="disk", min_tensor_bytes=1)


class Block(nn.Module):
    """Saves its input, a hidden tensor, its tanh and strided parts of one projection."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x):
        query, key, value = torch.tanh(self.up(x)).chunk(3, dim=-1)
        return x + query * key * value * self.scale


MOMENTUM = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def job_of(width: int = WIDTH, num_blocks: int = 5, batch_size: int = 12, loss=mean_square) -> Job:
    blocks = lambda: nn.Sequential(*(Block(width) for _ in range(num_blocks)))  # noqa: E731
    return mean_square_job(blocks, width, batch_size=batch_size, loss=loss, optimizer=MOMENTUM)


@dataclass(frozen=True, kw_only=True)
class OnFakeCard(ActivationOffload):
    """Move as on a GPU, over streams of a fake one. The CPU's tensors stand for the card's."""

    min_tensor_bytes: int = 1
    to: str = "disk"  # what the CPU allows
    cuda: FakeCuda
    by_way_of_file: bool = False

    def _storage(self, session):
        pool = BufferPool(session.spill, is_pinned=False)
        stream = CopyStream(self.cuda)
        if self.by_way_of_file:
            return HostThenFileStorage(pool, stream, SpillFile(session.spill))
        return HostStorage(pool, stream)


def parameters_after(job: Job, strategies, batches) -> list[torch.Tensor]:
    """Run several steps and give the parameters."""
    run = unguarded_run(session_of(job), Plan(strategies=strategies))
    for batch in batches:
        run.step(batch)
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def batches_of(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, WIDTH, generator=generator) for size in sizes]


def assert_same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- on a GPU: the order of copies ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("by_way_of_file", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize(
    "others",
    [(), (ActivationCheckpointing(),), (MicroBatching(micro_batch_size=5),)],
    ids=["alone", "checkpointed", "micro-batches"],
)
def test_many_steps_on_unlucky_streams_train_the_same_model(others, by_way_of_file):
    cuda = FakeCuda()
    offload = OnFakeCard(cuda=cuda, by_way_of_file=by_way_of_file)
    strategies = sorted((*others, offload), key=lambda each: each.name)
    batches = batches_of(12, 12, 7, 12, 3, 12)
    found = parameters_after(job_of(), strategies, batches)
    assert_same(found, parameters_after(job_of(), others, batches))
    assert cuda.spoiled == []


def test_copies_wait_for_the_computation_and_the_computation_for_copies():
    cuda = FakeCuda()
    session = session_of(job_of(num_blocks=3))
    OnFakeCard(cuda=cuda, min_tensor_bytes=12 * 3 * WIDTH * FLOAT).apply(session)
    session.gradient_pass(session, batches_of(12)[0], lambda phase: None)
    out = [("copy 1", "waits for", "compute"), ("copy 1", "copies", "")]  # or in
    settled = [("compute", "waits for", "copy 1")]
    assert cuda.log == [
        *(out + settled),  # block 0, while block 1 computes
        *(out + settled),  # block 1, while block 2 computes; block 2 stays
        *out,  # block 1 is asked for when backward reaches block 2
        *out,  # block 0, when it reaches block 1
        *settled,  # block 1 is used
        *settled,  # block 0 is used
    ]


def test_the_host_waits_before_it_writes_a_buffer_to_disk_or_reads_into_it():
    cuda = FakeCuda()
    session = session_of(job_of(num_blocks=3))
    strategy = OnFakeCard(cuda=cuda, min_tensor_bytes=12 * 3 * WIDTH * FLOAT, by_way_of_file=True)
    strategy.apply(session)
    session.gradient_pass(session, batches_of(12)[0], lambda phase: None)
    copy = [("copy 1", "waits for", "compute"), ("copy 1", "copies", "")]
    settled = [("compute", "waits for", "copy 1")]
    host_waits = [("host", "waits for", "copy 1")]
    assert cuda.log == [
        *(copy + settled + host_waits),  # block 0 is written
        *(copy + settled + host_waits),  # block 1 is written
        *(host_waits + copy),  # block 1 is read
        *(host_waits + copy),  # block 0 is read
        *(settled + settled),
    ]


def test_buffers_are_made_for_a_batch_size_once():
    session = session_of(job_of())
    OnFakeCard(cuda=FakeCuda()).apply(session)
    held = []
    for batch in batches_of(12, 12, 9, 12, 10, 9):
        session.gradient_pass(session, batch, lambda phase: None)
        held.append(session.spill.host_bytes)
    assert 0 < held[0] == held[1] < held[2]  # 9 rows round to less than 12 do
    assert held[3:] == held[2:3] * 3


def test_what_was_brought_and_never_used_spoils_nothing():
    """Backward through a part of the graph asks early for blocks that it never reaches."""
    cuda = FakeCuda()
    session = session_of(job_of())
    undo = OnFakeCard(cuda=cuda).apply(session)
    model = session.model
    for _ in range(2):
        loss = session.loss_of(batches_of(12)[0])
        torch.autograd.grad(loss, list(model[4].parameters()))
        del loss
    undo()
    assert cuda.spoiled == []


def test_a_graph_that_is_kept_can_be_gone_through_twice():
    session = session_of(job_of())
    undo = OnFakeCard(cuda=FakeCuda()).apply(session)
    loss = session.loss_of(batches_of(12)[0])
    parameters = list(session.model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    undo()
    assert_same(second, first)
    assert_same(first, torch.autograd.grad(session.loss_of(batches_of(12)[0]), parameters))


def test_closing_gives_up_the_buffers():
    session = session_of(job_of())
    undo = OnFakeCard(cuda=FakeCuda(), by_way_of_file=True).apply(session)
    session.gradient_pass(session, batches_of(12)[0], lambda phase: None)
    assert min(session.spill.host_bytes, session.spill.disk_bytes) > 0
    undo()
    assert (session.spill.host_bytes, session.spill.disk_bytes) == (0, 0)
    assert session.spill.peak_disk_bytes > 0


# --- what is moved --------------------------------------------------------------------------------


def spill_of(job: Job, *strategies) -> Spill:
    """Take the gradients of one batch and give what was moved."""
    session = session_of(job)
    apply_strategies(session, strategies)
    session.gradient_pass(session, job.batch(job.batch_size), lambda phase: None)
    return session.spill


def test_everything_but_the_last_block_goes_and_comes_back():
    spill = spill_of(job_of(), EVERYTHING)
    hidden = 12 * WIDTH * FLOAT
    # The input, the tanh whose three parts are factors, and the product of two of them.
    assert spill.out_bytes == dict.fromkeys("0123", hidden + 3 * hidden + hidden)
    assert spill.in_bytes == spill.out_bytes


def test_parameters_their_views_and_buffers_stay():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("scale", torch.randn(64))
            self.inner = nn.Identity()

        def forward(self, x):
            return (x @ self.weight.view(4096).view(64, 64)) * self.scale

    job = replace(
        job_of(width=64), model=lambda: nn.Sequential(nn.Linear(64, 64), Bare(), Bare(), Bare())
    )
    spill = spill_of(job, EVERYTHING)
    assert spill.out_bytes == dict.fromkeys("12", 12 * 64 * FLOAT)


def test_a_tensor_that_is_saved_twice_goes_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            return x.sin() + x.cos() + x.view(-1).exp().view_as(x).tanh() * 0

    job = replace(
        job_of(), model=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), Twice(), Twice())
    )
    spill = spill_of(job, EVERYTHING)
    assert spill.out_bytes == dict.fromkeys("12", 3 * 12 * WIDTH * FLOAT)  # x, exp(x), tanh
    assert spill.in_bytes == spill.out_bytes


def test_what_all_blocks_save_goes_once():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(5))

        def forward(self, x):
            scale = x.sin()
            return sum(block(scale) for block in self.blocks)

    spill = spill_of(replace(job_of(), model=Sum), EVERYTHING)
    assert spill.out_bytes == {"blocks.0": 12 * WIDTH * FLOAT}


def test_parts_of_a_tensor_that_lie_together_go_one_by_one():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            first, second = torch.tanh(self.inner(x)).chunk(2)
            return torch.cat([first.exp(), second * second.sin()])

    job = replace(job_of(), model=lambda: nn.Sequential(*(Halves() for _ in range(3))))
    batches = batches_of(12, 12)
    assert_same(
        parameters_after(job, (OnFakeCard(cuda=FakeCuda()),), batches),
        parameters_after(job, (), batches),
    )
    part = 6 * WIDTH * FLOAT
    # Input, tanh (both halves as one, and the second alone), and what exp and sin give.
    assert spill_of(job, EVERYTHING).out_bytes == dict.fromkeys("01", (2 + 2 + 1 + 2) * part)


class Changing(nn.Module):
    """Keep one tensor's sine, change the tensor and go on with its new values."""

    def __init__(self, *, is_used: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.is_used = is_used
        self.sine = None

    def forward(self, x):
        hidden = self.inner(x)
        self.sine = hidden.sin()
        hidden.add_(1.0)
        return hidden.cos() + (self.sine if self.is_used else 0.0)


def changing_job(*, is_used: bool) -> Job:
    return replace(
        job_of(),
        model=lambda: nn.Sequential(*(Changing(is_used=is_used) for _ in range(3))),
    )


def test_a_tensor_that_was_changed_in_place_is_another_one():
    job, batches = changing_job(is_used=False), batches_of(12, 12)
    for strategy in (EVERYTHING, OnFakeCard(cuda=FakeCuda())):
        assert_same(parameters_after(job, (strategy,), batches), parameters_after(job, (), batches))


@pytest.mark.parametrize("blocks", [(), ("2",)], ids=["sent", "last"])
def test_what_autograd_would_refuse_as_changed_in_place_is_refused(blocks):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        parameters_after(changing_job(is_used=True), (), batches_of(12))
    for strategy in (replace(EVERYTHING, blocks=blocks), OnFakeCard(cuda=FakeCuda())):
        with pytest.raises(StrategyError, match="was changed in place later"):
            parameters_after(changing_job(is_used=True), (strategy,), batches_of(12))


def test_small_tensors_stay():
    hidden = 12 * WIDTH * FLOAT
    spill = spill_of(job_of(), replace(EVERYTHING, min_tensor_bytes=2 * hidden))
    assert spill.out_bytes == dict.fromkeys("0123", 3 * hidden)
    assert spill_of(job_of(), ActivationOffload(to="disk")).out_bytes == {}


def test_named_blocks_alone_are_moved():
    spill = spill_of(job_of(), replace(EVERYTHING, blocks=("0-1", "3")))
    assert list(spill.out_bytes) == ["0", "1"]


def test_a_checkpointed_block_moves_its_input_alone():
    session = session_of(job_of())
    apply_strategies(session, (ActivationCheckpointing(), EVERYTHING))
    batch = batches_of(12)[0]
    session.gradient_pass(session, batch, lambda phase: None)
    assert session.spill.out_bytes == dict.fromkeys("0123", 12 * WIDTH * FLOAT)
    assert session.spill.in_bytes == session.spill.out_bytes  # and nothing on recomputation


def test_nothing_is_moved_inside_a_block_that_is_recomputed_as_a_whole():
    session = session_of(job_of())
    EVERYTHING.apply(session)
    ActivationCheckpointing().apply(session)
    loss = session.gradient_pass(session, batches_of(12)[0], lambda phase: None)
    assert session.spill.out_bytes == {}
    plain = session_of(job_of())
    assert_same([loss], [plain.gradient_pass(plain, batches_of(12)[0], lambda phase: None)])
    assert_same(
        [p.grad for p in session.model.parameters()], [p.grad for p in plain.model.parameters()]
    )


def test_undo_gives_back_what_checkpointing_had_put_there():
    session = session_of(job_of())
    apply_strategies(session, (ActivationCheckpointing(),))
    before = [vars(block)["forward"] for block in session.model]
    undo = EVERYTHING.apply(session)
    assert [vars(block)["forward"] for block in session.model] != before
    undo()
    assert [vars(block)["forward"] for block in session.model] == before
    assert session.forward_contexts == []


def test_evaluation_moves_nothing():
    session = session_of(job_of())
    EVERYTHING.apply(session)
    with torch.no_grad():
        session.loss_of(batches_of(12)[0])
    assert session.spill.out_bytes == {}


def test_the_label_names_the_smallest_size_only_where_it_is_unusual():
    assert ActivationOffload().label() == "activation-offload(to=host)"
    assert replace(EVERYTHING, blocks=("0-3",)).label() == (
        "activation-offload(blocks=0-3, to=disk, min_tensor_bytes=1)"
    )


# --- on disk --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have temporary files made in a folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_many_steps_by_way_of_disk_train_the_same_model(folder):
    batches = batches_of(12, 12, 5, 12, 3)
    assert_same(
        parameters_after(job_of(), (EVERYTHING,), batches), parameters_after(job_of(), (), batches)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_bytes_of_every_type_come_back_as_they_were(dtype, folder):
    file = SpillFile(Spill())
    tensors = [torch.randn(257).to(dtype), torch.randn(31).to(dtype)]
    slots = [file.write(tensor) for tensor in tensors]
    for slot, tensor in reversed(list(zip(slots, tensors, strict=True))):
        found = torch.empty_like(tensor)
        file.read(slot, found)
        assert torch.equal(found, tensor)
    file.close()


def test_places_in_the_file_are_used_again_whatever_the_batch_size(folder):
    session = session_of(job_of())
    EVERYTHING.apply(session)
    held = []
    for batch in batches_of(12, 11, 12, 10, 9):
        session.gradient_pass(session, batch, lambda phase: None)
        held.append(session.spill.disk_bytes)
    assert held == held[:1] * 5


def test_the_file_has_no_name_and_is_gone_when_the_run_is_closed(folder):
    run = unguarded_run(session_of(job_of()), Plan(strategies=(EVERYTHING,)))
    run.step(batches_of(12)[0])
    spill = run._steps.session.spill
    assert spill.disk_bytes == sum(spill.out_bytes.values()) > 0
    assert list(folder.iterdir()) == []
    run.close()
    assert spill.disk_bytes == 0


def test_a_step_that_fails_leaves_no_place_taken(folder):
    is_failing = [True]

    def loss(model, batch):
        out = model(batch)
        if is_failing:
            raise MemoryError
        return out.square().mean()

    run = unguarded_run(session_of(job_of(loss=loss)), Plan(strategies=(EVERYTHING,)))
    for _ in range(3):
        with pytest.raises(MemoryError):
            run.step(batches_of(12)[0])
    is_failing.clear()
    run.step(batches_of(12)[0])
    spill = run._steps.session.spill
    assert spill.disk_bytes == sum(spill.out_bytes.values())
    run.close()


def test_a_full_disk_is_an_error_that_says_what_to_do(folder, monkeypatch):
    full = partial(Path("/dev/full").open, "wb+", buffering=0)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full())
    run = unguarded_run(session_of(job_of()), Plan(strategies=(EVERYTHING,)))
    with pytest.raises(DataError, match=r"cannot be written .*No space left.* set TMPDIR"):
        run.step(batches_of(12)[0])
    run.close()


def test_a_missing_folder_is_an_error_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    run = unguarded_run(session_of(job_of()), Plan(strategies=(EVERYTHING,)))
    with pytest.raises(DataError, match=r"missing: .*No such file.* set TMPDIR"):
        run.step(batches_of(12)[0])


# --- predicted for a GPU --------------------------------------------------------------------------


def recorded_spill(job: Job, *strategies, monkeypatch) -> tuple[Spill, int]:
    """Record two steps on a virtual GPU; return what lies elsewhere, and the peak on the card."""
    sessions = []

    def opened(*args):
        sessions.append(open_plain_session(*args))
        return sessions[-1]

    monkeypatch.setattr("memfit.prediction.recording.open_plain_session", opened)
    prediction = memfit.predict(job, "a100-40gb", Plan(strategies=strategies))
    return sessions[-1].spill, prediction.peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.parametrize("to", ["host", "disk"])
def test_on_a_virtual_card_two_blocks_are_there_at_a_time(to, monkeypatch):
    job = job_of(width=256, num_blocks=8, batch_size=4096)
    hidden = 4096 * 256 * FLOAT
    saved = 5 * hidden  # of each block: its input, three parts of a tanh, one product
    _, plain = recorded_spill(job, monkeypatch=monkeypatch)
    spill, peak = recorded_spill(job, ActivationOffload(to=to), monkeypatch=monkeypatch)
    assert plain - peak == pytest.approx(6 * saved, abs=2 * hidden)
    assert spill.out_bytes == dict.fromkeys("0123456", saved)
    assert spill.in_bytes == spill.out_bytes
    outside = spill.peak_host_bytes if to == "host" else spill.peak_disk_bytes
    assert outside >= 7 * saved


@pytest.mark.slow
def test_on_a_virtual_card_a_checkpointed_block_sends_its_input(monkeypatch):
    job = job_of(width=256, num_blocks=8, batch_size=4096)
    hidden = 4096 * 256 * FLOAT
    _, kept = recorded_spill(job, ActivationCheckpointing(), monkeypatch=monkeypatch)
    spill, moved = recorded_spill(
        job, ActivationCheckpointing(), ActivationOffload(), monkeypatch=monkeypatch
    )
    assert spill.out_bytes == dict.fromkeys("0123456", hidden)
    # Block 0's input is the batch, which stays; one block's input is on its way at any time.
    assert kept - moved == pytest.approx(5 * hidden, abs=hidden)


@pytest.mark.slow
def test_buffers_on_the_host_count_as_torch_rounds_them(monkeypatch):
    job = job_of(width=256, num_blocks=3, batch_size=3000)
    spill, _ = recorded_spill(job, ActivationOffload(), monkeypatch=monkeypatch)
    # 3000 rows are 2.93 MiB (rounded to 4), the tanh of the projection 8.8 MiB (rounded to 16).
    assert spill.peak_host_bytes == 2 * (2 * 4 + 16) * MIB


@pytest.mark.slow
def test_autocast_goes_together_with_it(monkeypatch):
    job = job_of(width=256, num_blocks=4, batch_size=4096)
    _, plain = recorded_spill(job, Bf16(), monkeypatch=monkeypatch)
    spill, peak = recorded_spill(job, ActivationOffload(), Bf16(), monkeypatch=monkeypatch)
    assert peak < plain
    assert sum(spill.out_bytes.values()) > 0


@pytest.mark.slow
def test_options_are_those_of_the_device():
    job = job_of()
    assert [s.to for s in ActivationOffload.options(record(job).facts)] == ["disk"]
    facts = replace(record(job).facts, device_type="cuda")
    assert [s.to for s in ActivationOffload.options(facts)] == ["host"]
    assert list(ActivationOffload.options(replace(facts, block_levels=()))) == []
