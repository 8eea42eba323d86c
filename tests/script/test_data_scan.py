"""The training data of scripts is read to its end, and their loops get the largest batches."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.script.running import measured, recorded

from memfit.devices.catalogue import load_device
from memfit.reports.script_text import data_lines
from memfit.script.prediction import ScriptPrediction, predict_recorded_script

MODEL = """
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    LENGTHS = [7, 9, 8, 30, 5, 60, 12, 90, 20, 14, 45, 6, 33, 11, 75, 10, 17, 52, 4, 25]
    LENGTHS += [length - 1 for length in LENGTHS]

    class Texts(Dataset):
        def __len__(self):
            return len(LENGTHS)
        def __getitem__(self, i):
            return [1] * LENGTHS[i]

    class Stream(IterableDataset):
        def __iter__(self):
            for length in LENGTHS:
                yield [1] * length

    def padded(rows):
        longest = max(map(len, rows))
        return {"ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows])}

    embedding = torch.nn.Embedding(50, 256)
    head = torch.nn.Linear(256, 50)
    optimizer = torch.optim.AdamW([*embedding.parameters(), *head.parameters()], 0.1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    embedding.to(device), head.to(device)

    def step(batch):
        x = embedding(batch["ids"].to(device))
        loss = head((x @ x.transpose(1, 2)).softmax(-1) @ x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script that ends with a loop of its own into an empty folder."""
    monkeypatch.chdir(tmp_path)

    def write(loop: str, model: str = MODEL) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(model) + textwrap.dedent(loop))
        return path

    return write


def _predicted(path: Path, device: str = "cpu", **question) -> ScriptPrediction:
    found = recorded(path, device=device, data_seconds=30.0, **question)
    return predict_recorded_script("train.py", found, load_device(device))


LOOP = """
    for batch in DataLoader(Texts(), batch_size=2, collate_fn=padded):
        step(batch)
"""


@pytest.mark.slow
def test_the_largest_batch_of_the_epoch_takes_what_it_takes_for_real(script):
    path = script(LOOP)
    data = _predicted(path).data
    assert (data.num_batches, data.is_complete) == (20, True)
    assert data.largest.position == 3
    assert data.largest.shapes == ["int64[2, 90]"]
    assert data.largest.is_confirmed
    steps = [peak for phase, peak in measured(path, num_steps=20) if "step" in phase]
    assert data.largest.peak_allocated_bytes == pytest.approx(steps[3], rel=0.01)
    assert data.quantiles_bytes["100 %"] == pytest.approx(max(steps[1:20]), rel=0.01)
    later = sorted(steps[1:20])  # the first batch is short, but its step makes the states
    assert data.quantiles_bytes["50 %"] == pytest.approx(later[9], rel=0.001)
    assert data.quantiles_bytes["90 %"] == pytest.approx(later[16], rel=0.001)
    assert data.method["fitted"] >= 8
    assert data.fitted_fraction == 1.0


@pytest.mark.slow
def test_the_steps_of_an_epoch_are_replayed_on_a_card(script):
    found = _predicted(script(LOOP), "t4")
    plain, expandable = (found.data.sequence[name] for name in ("default", "expandable_segments"))
    assert plain.num_steps == expandable.num_steps == 2000
    assert plain.survived
    assert expandable.survived
    assert plain.peak_reserved_bytes >= plain.peak_allocated_bytes
    assert found.data.method["fitted"] > 0
    assert found.data.method["larger than recorded"] == 0
    assert "largest batch" in {phase.phase for phase in found.phases}
    assert found.data.largest.peak_allocated_bytes > found.data.largest.steady_peak_bytes
    assert found.to_json()["data"]["largest"]["position"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        """
        for batch in DataLoader(Texts(), batch_size=2, collate_fn=padded, num_workers=2):
            step(batch)
        """,
        """
        for batch in DataLoader(Stream(), batch_size=2, collate_fn=padded):
            step(batch)
        """,
        """
        loader = DataLoader(Texts(), batch_size=2, collate_fn=padded)
        while True:
            step(next(iter(loader)))
        """,
        """
        loader = iter(DataLoader(Texts(), batch_size=2, collate_fn=padded))
        batch = next(loader)
        for following in loader:
            step(batch)
            batch = following
        """,
        """
        for epoch in range(9):
            for number, batch in enumerate(DataLoader(Texts(), batch_size=2, collate_fn=padded)):
                if number == 4:
                    break
                step(batch)
        """,
        """
        class Holder(dict):
            pass
        def held(rows):
            return Holder(inner=(padded(rows), "name"))
        for batch in DataLoader(Texts(), batch_size=2, collate_fn=held):
            step(batch["inner"][0])
        """,
    ],
    ids=["workers", "stream", "next-of-iter", "one-ahead", "dropped", "nested"],
)
def test_loops_of_many_kinds_get_the_largest_batch(script, loop):
    data = _predicted(script(loop)).data
    assert data.is_complete
    assert data.largest.shapes == ["int64[2, 90]"]
    assert data.largest.is_confirmed
    assert 500_000 < data.largest.steady_peak_bytes < data.largest.peak_allocated_bytes


@pytest.mark.slow
def test_accumulated_batches_are_handed_as_often_as_a_step_reads_them(script):
    loop = """
    scaled = [optimizer.step, optimizer.zero_grad]
    optimizer.step = lambda: None
    optimizer.zero_grad = lambda: None
    for number, batch in enumerate(DataLoader(Texts(), batch_size=1, collate_fn=padded)):
        step(batch)
        if number % 2:
            scaled[0](), scaled[1]()
    """
    data = _predicted(script(loop)).data
    assert data.largest.shapes == ["int64[1, 90]"]
    assert data.largest.is_confirmed


@pytest.mark.slow
def test_equal_shapes_are_said_and_nothing_is_replayed(script):
    loop = """
    LENGTHS[:] = [20] * 40
    for batch in DataLoader(Texts(), batch_size=2, collate_fn=padded):
        step(batch)
    """
    data = _predicted(script(loop), "t4").data
    assert (data.num_shapes, data.largest, data.sequence) == (1, None, {})
    assert "every batch has the same shape" in data_lines(data)[-1]


@pytest.mark.slow
def test_a_script_without_a_loader_is_told_so(script):
    loop = """
    for number in range(9):
        step({"ids": torch.ones(2, 9 + number, dtype=torch.int64)})
    """
    found = recorded(script(loop), data_seconds=30.0)
    assert len(found.recording.marks) == 3
    assert "no DataLoader" in found.data.reason


@pytest.mark.slow
def test_a_stream_without_end_is_read_for_the_given_time(script):
    loop = """
    class Endless(Stream):
        def __iter__(self):
            while True:
                yield from super().__iter__()
    for batch in DataLoader(Endless(), batch_size=2, collate_fn=padded):
        step(batch)
    """
    found = recorded(script(loop), data_seconds=0.2)
    assert not found.data.is_complete
    assert found.data.scan_seconds < 2
    assert len(found.data.order) > 20
    assert found.data.recorded


def test_a_loop_that_ends_early_leaves_batches_unrecorded_and_says_so(script):
    loop = """
    LENGTHS[:] = [7, 7, 7, 7, 7, 7, 5, 5] + LENGTHS
    for number, batch in enumerate(DataLoader(Texts(), batch_size=2, collate_fn=padded)):
        if number == 3:
            break
        step(batch)
    """
    data = _predicted(script(loop)).data
    assert data.largest is None
    assert data.num_not_recorded > 0
    assert "the loop ended before" in data_lines(data)[-1]


@pytest.mark.slow
def test_without_the_question_nothing_is_scanned(script):
    assert recorded(script(LOOP)).data is None
