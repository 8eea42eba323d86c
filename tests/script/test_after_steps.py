"""What comes after the recorded steps: loops get to their evaluation, checkpoint and next training."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.script.running import measured, predicted, recorded

from memfit.script.after_steps import AfterSteps
from memfit.virtual.loaders import Asked

START = """
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(64)

def step(model, optimizer, x):
    model.train()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()

def evaluate():
    model.eval()
    with torch.no_grad():
        model(torch.ones(100, 64))

model = nn.Linear(64, 700)
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.ones(96, 64))
"""
LOOPS = {
    "next over endless data": """
batches = iter(DataLoader(Endless(), 8))
for _ in range(12):
    step(model, optimizer, next(batches))
evaluate()
""",
    "next over data that suffices": """
batches = iter(DataLoader(data, 8))
for _ in range(12):
    step(model, optimizer, next(batches)[0])
evaluate()
""",
    "next that begins anew": """
batches = iter(DataLoader(data, 8))
for _ in range(30):
    try:
        x, = next(batches)
    except StopIteration:
        batches = iter(DataLoader(data, 8))
        x, = next(batches)
    step(model, optimizer, x)
evaluate()
""",
    "every so many steps": """
done = 0
for epoch in range(3):
    for x, in DataLoader(data, 8):
        step(model, optimizer, x)
        done += 1
        if done % 8 == 0:
            evaluate()
""",
    "no loader": """
for _ in range(2):
    for _ in range(12):
        step(model, optimizer, torch.ones(8, 64))
    evaluate()
""",
}
SAVE = "torch.save(model.state_dict(), 'last.pt')\n"
COPIED = """
def train(model):
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        step(model, optimizer, torch.ones(8, 64))
    return copy.deepcopy(model)

model = train(model)
del optimizer
step(model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(8, 64))
evaluate()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script into an empty folder, which is the working one."""
    monkeypatch.chdir(tmp_path)

    def write(source: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(START + textwrap.dedent(source))
        return path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_many_kinds_get_to_their_evaluation_and_checkpoint(script, loop):
    found = recorded(script(LOOPS[loop] + SAVE))
    assert found.missing == []
    assert not any("ended with" in note for note in found.notes)
    assert len(found.recording.marks) == 3


@pytest.mark.slow
def test_what_is_saved_while_loading_is_no_checkpoint(script):
    found = recorded(script("torch.save(torch.ones(9), 'data.pt')\n" + LOOPS["no loader"]))
    assert found.missing == ["checkpoint"]


def test_an_epoch_that_was_cut_short_is_told_with_its_length(script):
    source = "for x, in DataLoader(data, 8):\n    step(model, optimizer, x)\nevaluate()\n" + SAVE
    (note,) = recorded(script(source)).notes
    assert note.startswith("Evaluation and checkpoint came after 3 steps: the epoch, of 12 batches")


@pytest.mark.slow
def test_what_a_script_has_dropped_is_gone_and_a_later_training_is_a_phase(script):
    path = script(COPIED)
    found, real = dict(predicted(recorded(path))), dict(measured(path))
    # Neither the optimizer's states nor the model that was copied are there any more.
    assert found["evaluation"] == pytest.approx(real["evaluation"], rel=0.001)
    assert found["later training"] == pytest.approx(real["later training"], rel=0.001)


def test_extra_steps_and_the_time_for_them_have_an_end():
    now = [0.0]
    after = AfterSteps(lambda: now[0])
    after.begin()
    endless, epoch = Asked(source="a"), Asked(source="b", num_batches=9)
    assert after.may_give(endless)
    assert [after.may_give(epoch), after.may_give(epoch)] == [False, True]
    now[0] = 30.0
    assert after.may_give(endless)
    assert not after.may_give(epoch)
    now[0] = 61.0
    assert not after.may_give(endless)
    assert not after.may_step()
    after.see_all()
    assert not after.is_over
    now[0] = 82.0
    assert after.is_over
