"""Where the batches of a written job come from: ``next``, and parts of different lengths."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch

from memfit.errors import JobError
from memfit.job import load_job
from memfit.script.drawn_batches import DrawnBatches
from memfit.script.job_file.answer import job_from_script
from memfit.script.job_file.loop import NoJobError, find_training_loop
from memfit.script.job_file.next_batch import first_line_with_batch, taken_by_next
from memfit.script.job_file.prelude import Prelude
from memfit.script.job_file.proof import padding_of

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.randint(1, 50, (3 + (i * 7) % 11,), generator=torch.Generator().manual_seed(i))


def collate(rows):
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"ids": ids, "y": torch.arange(len(rows)) % 2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32, padding_idx=0)
        self.head = nn.Linear(32, 2)
    def forward(self, ids):
        mask = (ids != 0).unsqueeze(-1).float()
        mean = (self.words(ids) * mask).sum(1) / mask.sum(1)
        return self.head(mean + 0.1 * torch.randn_like(mean))


net = Net().to(device)
loader = DataLoader(Rows(), batch_size=8, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
data = iter(loader)
for step in range(8):
    try:
        batch = next(data)
    except StopIteration:
        data = iter(loader)
        batch = next(data)
    ids, y = batch["ids"].to(device), batch["y"].to(device)
    loss = nn.functional.cross_entropy(net(ids), y)
    scaler.scale(loss / 2).backward()
    if step % 2:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
"""


@pytest.mark.slow
def test_batches_taken_by_next_and_filled_up_to_one_length_become_a_job(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    answer = job_from_script(script, (), tmp_path / "job_train.py")
    assert (answer.batch_size, answer.num_backwards) == (16, 2)
    assert answer.relative_loss_error == 0
    text = (tmp_path / "job_train.py").read_text()
    assert "padding={'ids': 0}" in text
    assert "    while True:\n        for batch in loader:\n            yield batch" in text
    assert "def make_scheduler(optimizer)" in text
    job = load_job(f"{tmp_path / 'job_train.py'}:job")
    assert job.batch(16)["ids"].shape[0] == 16


def test_a_step_that_is_a_method_is_refused_by_its_name(tmp_path):
    script = tmp_path / "some.py"
    script.write_text("class Trainer:\n    def train_step(self, x):\n        x.backward()\n")
    with pytest.raises(
        NoJobError, match=r"line 2: the training step is a method, Trainer.train_st"
    ):
        find_training_loop(script)


def found_in(text):
    tree = ast.parse(textwrap.dedent(text))
    loop = next(node for node in tree.body if isinstance(node, ast.For))
    before = tree.body[: tree.body.index(loop)]
    return loop, Prelude(setup=list(before))


def training_loop(tmp_path):
    script = tmp_path / "some.py"
    script.write_text("for x in []:\n    x.backward()\n")
    return find_training_loop(script)


def test_an_iterator_that_ends_gives_batches_that_end(tmp_path):
    loop, prelude = found_in("""
        data = iter(loader)
        for _ in range(3):
            model.train()
            x, y = next(data)
            loss = f(x)
    """)
    taken = taken_by_next(training_loop(tmp_path), prelude, loop.body)
    assert ast.unparse(taken.header.iter) == "loader"
    assert not taken.begins_anew
    assert first_line_with_batch(loop.body) == loop.body[2].lineno


@pytest.mark.parametrize(
    ("made", "reason"),
    [("data = make()", "not made by iter"), ("data = iter(a)\ndata = iter(b)", "different things")],
)
def test_an_iterator_of_unknown_origin_is_refused(made, reason, tmp_path):
    loop, prelude = found_in(f"{made}\nfor _ in range(3):\n    x = next(data)\n    loss = f(x)\n")
    with pytest.raises(NoJobError, match=reason):
        taken_by_next(training_loop(tmp_path), prelude, loop.body)


def test_what_rows_are_filled_up_with_is_seen_at_their_ends():
    rows = [
        {"ids": torch.tensor([[5, 1, 1], [5, 6, 7]]), "mask": torch.tensor([[1, 0, 0], [1, 1, 1]])},
        {"ids": torch.tensor([[5, 6, 1, 1]] * 2), "mask": torch.tensor([[1, 1, 0, 0]] * 2)},
    ]
    assert padding_of(rows) == {"ids": 1, "mask": 0}
    assert padding_of([{"ids": torch.zeros(2, 3)}] * 2) == {}


def test_windows_of_different_lengths_are_filled_up_where_it_is_said_with_what():
    def batches():
        yield {"ids": torch.ones(2, 3), "y": torch.ones(2)}
        yield {"ids": torch.ones(2, 5), "y": torch.ones(2)}

    with pytest.raises(JobError, match="differ in more than their samples"):
        DrawnBatches(batches, window=2)
    drawn = DrawnBatches(batches, window=2, padding={"ids": 9})
    whole = drawn.of_size(4)
    assert whole["ids"].tolist() == [[1, 1, 1, 9, 9]] * 2 + [[1] * 5] * 2
    assert whole["y"].tolist() == [1] * 4
