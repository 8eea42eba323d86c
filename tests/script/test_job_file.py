"""Jobs that are written from scripts: the same loss, the same update, the same bytes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import memfit
from memfit.errors import JobError, MemfitError
from memfit.job import load_job
from memfit.script.drawn_batches import DrawnBatches
from memfit.script.job_file.answer import job_from_script
from memfit.script.job_file.facts import OptimizerGroup, SeenOptimizer, SeenScript
from memfit.script.job_file.loop import NoJobError, find_training_loop
from memfit.script.job_file.loss import cut_loss
from memfit.script.job_file.prelude import sort_prelude
from memfit.script.job_file.text import Cut, job_text

GUARDED = """
    import argparse
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.2))
            self.head = nn.Linear(width, 3)
        def forward(self, x):
            return self.head(self.body(x))

    def train(net, loader, criterion, optimizer, scheduler, epoch, device, args):
        net.train()
        total = 0.0
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            if args.keep and epoch == 0 and i == 0:
                first = {"weights": {k: v.clone() for k, v in net.state_dict().items()},
                         "batch": (x, y), "random": torch.get_rng_state()}
            loss = criterion(net(x), y)
            total += loss.item()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            if args.keep and epoch == 0 and i == 0:
                torch.save({**first, "loss": loss.item(), "after": net.state_dict()}, args.keep)
            if args.keep:
                break
        return total

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=64)
        parser.add_argument("--clip", type=float, default=0.05)
        parser.add_argument("--keep")
        args = parser.parse_args()
        torch.manual_seed(3)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        data = TensorDataset(torch.randn(48, 16), torch.randint(3, (48,)))
        loader = DataLoader(data, batch_size=12, shuffle=True)
        model = Net(args.width).to(device)
        print("parameters", sum(p.numel() for p in model.parameters()))
        decay = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], lr=0.01
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        for epoch in range(2):
            train(model, loader, criterion, optimizer, scheduler, epoch, device, args)

    if __name__ == "__main__":
        main()
"""

FLAT = """
    import torch
    from contextlib import nullcontext
    from torch import nn

    torch.manual_seed(0)
    steps, size, device = 3, 4, "cpu"
    autocast = nullcontext()
    net = nn.Sequential(nn.Linear(6, 999), nn.Tanh(), nn.Linear(999, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=True)

    def get_batch():
        rows = torch.randn(size, 6)
        return rows.to(device), rows.sum(1, keepdim=True)

    x, y = get_batch()
    for it in range(4):
        for micro in range(steps):
            with autocast:
                out = net(x)
                loss = (out - y).square().mean()
                loss = loss / steps
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
"""


def script_at(folder: Path, text: str, name: str = "train_me.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a script, its job file, and the answer."""
    folder = tmp_path_factory.mktemp("job")
    script = script_at(folder, GUARDED)
    return folder, job_from_script(script, ["--width", "96"], folder / "job_train_me.py")


@pytest.mark.slow
def test_a_job_makes_the_same_update_as_its_script(written, monkeypatch):
    folder, answer = written
    monkeypatch.chdir(folder)
    assert answer.batch_size == 12
    assert abs(answer.relative_peak_error) < 0.01
    assert answer.script_other_bytes == 48 * (16 * 4 + 8)  # the data set
    words = [sys.executable, "train_me.py", "--width", "96", "--keep", "first.pt"]
    subprocess.run(words, check=True)
    first = torch.load("first.pt")
    job = load_job("job_train_me.py:job")
    model = job.model()
    model.load_state_dict(first["weights"])
    torch.set_rng_state(first["random"])
    assert job.loss(model, first["batch"]).item() == first["loss"]

    with memfit.start(job, guard=False) as run:
        run.model.load_state_dict(first["weights"])
        torch.set_rng_state(first["random"])
        run.step(first["batch"])
        for name, value in run.model.state_dict().items():
            torch.testing.assert_close(value, first["after"][name])


@pytest.mark.slow
def test_a_job_file_plans_and_trains_as_it_is(written, monkeypatch):
    monkeypatch.chdir(written[0])
    job = load_job("job_train_me.py")
    peak_bytes = memfit.predict(job).peak_allocated_bytes
    memfit.plan(job, budget=f"{int(0.95 * peak_bytes)}B").save("plan.yaml")
    words = [sys.executable, "job_train_me.py", "3"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert "step 3: loss" in done.stdout
    text = Path("job_train_me.py").read_text()
    assert "clip_grad_norm=args.clip" in text
    assert "make_scheduler(run.optimizer)" in text


@pytest.mark.slow
def test_parts_of_an_update_become_one_batch(tmp_path):
    script = script_at(tmp_path, FLAT)
    answer = job_from_script(script, [], tmp_path / "job_flat.py")
    assert (answer.num_backwards, answer.batch_size) == (3, 12)
    job = load_job(str(tmp_path / "job_flat.py"))
    model, batch = job.model(), job.batch(12)
    direct = (model(batch[0]) - batch[1]).square().mean()
    assert job.loss(model, batch).item() == pytest.approx(direct.item(), rel=1e-6)


@pytest.mark.slow
def test_parts_of_other_weights_than_samples_are_refused(tmp_path):
    uneven = FLAT.replace(
        "loss = (out - y).square().mean()",
        "loss = ((out - y).square() * (y > 0)).sum() / (y > 0).sum().clamp(min=1)",
    )
    script = script_at(tmp_path, uneven)
    with pytest.raises(MemfitError, match="parts weigh differently"):
        job_from_script(script, [], tmp_path / "job_flat.py")
    assert not (tmp_path / "job_flat.py").exists()
    assert (tmp_path / "job_flat.py.draft").exists()


def seen_in(script: Path) -> SeenScript:
    """What a run of GUARDED would show, all of its lines run."""
    group = OptimizerGroup(names=("w",), condition="", settings={"lr": 0.01})
    return SeenScript(
        model="net",
        modules={"net", "model"},
        devices={"device": "device"},
        tensors_outside={"table": "a tensor"},
        schedulers={"scheduler"},
        lines=set(range(1, 1 + len(script.read_text().splitlines()))),
        optimizer=SeenOptimizer(module="torch.optim.adamw", name="AdamW", groups=[group]),
        num_backwards=1,
        loss_factor=1,
        micro_batch_size=12,
    )


def text_from(folder: Path, text: str) -> str:
    script = script_at(folder, text)
    loop, seen = find_training_loop(script), seen_in(script)
    prelude = sort_prelude(loop, seen)
    loss = cut_loss(loop, prelude, seen)
    cut = Cut(loop=loop, prelude=prelude, loss=loss, seen=seen, arguments=())
    return job_text(cut, folder / "job_train_me.py")


LOSS = "loss = criterion(net(x), y)\n"
CHANGED = {
    "the loss reads epoch, which changes": (LOSS, "loss = criterion(net(x), y) * epoch\n"),
    "the loss reads total, which changes": (LOSS, "loss = criterion(net(x), y) + total\n"),
    "the loss reads table, a tensor with": (LOSS, "loss = criterion(net(x), y) + table\n"),
    "the loss depends on a statement that leaves": (
        LOSS,
        "for _ in x:\n                loss = net(x)\n                break\n",
    ),
    "the loop calls net.grow": (LOSS, "net.grow()\n            " + LOSS),
    "the loop changes the model": (LOSS, "net.head = nn.Linear(1, 1)\n            " + LOSS),
    "changes or reads gradients": ("scheduler.step()", "net.head.weight.grad.mul_(2)"),
    "not their values": ("clip_grad_norm_", "clip_grad_value_"),
    "the norm of all gradients at once": ("net.parameters(), args", "net.head.weight, args"),
    "stands inside `if`": ("loss.backward()", "if total >= 0: loss.backward()"),
    "called with stars": ("epoch, device, args)\n\n", "*rest)\n\n"),
}


@pytest.mark.parametrize("reason", CHANGED)
def test_what_cannot_be_translated_is_refused_by_name(tmp_path, reason):
    changed = GUARDED.replace(*CHANGED[reason])
    assert changed != GUARDED
    with pytest.raises(NoJobError, match=reason):
        text_from(tmp_path, changed)


def test_a_job_file_is_short_and_reads_as_the_script(tmp_path):
    text = text_from(tmp_path, GUARDED)
    assert "from train_me import" in text
    assert "def compute_loss(net, batch):\n    x, y = batch\n" in text
    assert "total" not in text.partition("if __name__")[0]
    assert "print(" not in text.partition("if __name__")[0]


LOOPS = {
    "2 calls of backward": "for x in y:\n    a.backward()\n    b.backward()\n",
    "calls a closure": "def f(): pass\nfor x in y:\n    loss.backward()\n    o.step(f)\n",
    "transformers' Trainer": "from transformers import Trainer\nTrainer().train()\n",
    "Lightning's Trainer": "import lightning as L\nL.Trainer().fit(m)\n",
    "called 2 times": "def f():\n    for x in y:\n        l.backward()\nf()\nf()\n",
    "is not around it": "def f():\n    l.backward()\nfor x in y:\n    f()\n",
    "the training step is a method, T.fit": (
        "class T:\n    def fit(self):\n        for x in y:\n            l.backward()\nT().fit()\n"
    ),
    "never calls backward": "print(1)\n",
}


@pytest.mark.parametrize("reason", LOOPS)
def test_a_script_without_one_plain_loop_is_refused(tmp_path, reason):
    script = script_at(tmp_path, LOOPS[reason])
    with pytest.raises(NoJobError, match=reason):
        find_training_loop(script)


def test_drawn_batches_are_cut_and_repeated():
    drawn = DrawnBatches(lambda: [{"x": torch.arange(4), "n": 2}] * 3, window=2)
    assert drawn.num_samples == 8
    assert drawn.of_size(3)["x"].tolist() == [0, 1, 2]
    assert drawn.of_size(9)["x"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert drawn.of_size(8)["n"] == 2
    assert len(list(drawn.windows())) == 1


@pytest.mark.parametrize(
    ("batches", "window", "reason"),
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4)], 2, "differ in more than their samples"),
        ([torch.zeros(2, 3)], 2, "fewer than 2 batches"),
        ([3], 1, "no tensor"),
    ],
)
def test_batches_that_are_no_batch_are_refused(batches, window, reason):
    with pytest.raises(JobError, match=reason):
        DrawnBatches(lambda: batches, window)
