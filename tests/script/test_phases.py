"""What frameworks, loaders and checkpoints do around the steps has the allocator's bytes as well."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.script.running import measured, predicted, recorded

FIT = """
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        def training_step(self, batch, _):
            return nn.functional.mse_loss(self.body(batch[0]), batch[0])
        def validation_step(self, batch, _):
            self.log("val_loss", nn.functional.mse_loss(self.body(batch[0]), batch[0]))
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    data = TensorDataset(torch.randn(640, 64))
    callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")]
    trainer = L.Trainer(
        max_epochs=2, accelerator="auto", devices=1, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        default_root_dir="out", check_val_every_n_epoch=1,
    )
    trainer.fit(Net(), DataLoader(data, 64), DataLoader(data, 128))
    raise SystemExit("the second epoch was trained as well")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script into an empty folder, which is the working one."""
    monkeypatch.chdir(tmp_path)

    def write(source: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(source))
        return path

    return write


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_an_epoch_of_lightning_ends_with_its_validation_and_its_checkpoint(script, device):
    pytest.importorskip("lightning")
    found = recorded(script(FIT), device=device)
    assert found.missing == []
    assert ["came after 3 steps" in note for note in found.notes] == [True]
    phases = [span.phase for span in found.spans]
    last_step = max(place for place, phase in enumerate(phases) if phase == "steady step")
    assert {"evaluation", "checkpoint"} <= set(phases[last_step:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_validation_of_lightning_has_the_bytes_that_the_allocator_reports(script):
    pytest.importorskip("lightning")
    path = script(FIT.replace("max_epochs=2", "max_epochs=1").replace("raise SystemExit", "print"))
    found, real = dict(predicted(recorded(path))), dict(measured(path, num_steps=10))
    assert found["evaluation"] == pytest.approx(real["evaluation"], rel=0.003)


@pytest.mark.slow
def test_a_batch_that_a_worker_sends_lies_in_the_process_that_trains(script):
    # One worker sends its batches in their order; of several, some may come before their turn.
    source = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.randn(64, 4096), torch.arange(64))
        model = torch.nn.Linear(4096, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for images, labels in DataLoader(data, 8, num_workers=1):
            torch.nn.functional.cross_entropy(model(images), labels % 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    path = script(source)
    found, real = predicted(recorded(path)), measured(path)
    assert found[:3] == real[:3]
    assert [phase for phase, _ in found[:3]] == ["load", "first step", "steady step"]


def test_beside_a_card_a_batch_of_a_worker_lies_on_the_host(script):
    source = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.randn(64, 4096))
        model = torch.nn.Linear(4096, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for images, in DataLoader(data, 8, num_workers=1):
            model(images.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    found = recorded(script(source), device="t4")
    all_data_bytes, batch_bytes = 64 * 4096 * 4, 8 * 4096 * 4
    host = [span.host_peak_bytes for span in found.spans if span.phase == "steady step"]
    # A loop holds the last batch until it has the next.
    assert max(host) == all_data_bytes + 2 * batch_bytes


def test_copies_of_what_is_computed_from_data_keep_their_values(script, capfd):
    source = """
        import copy
        import torch
        lengths = torch.tensor([3, 1, 2]) * 1
        copied = copy.deepcopy(lengths)
        print("copied", copied.tolist())
        model = torch.nn.Linear(4, 4)
        model(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    """
    recorded(script(source))
    assert "copied [3, 1, 2]" in capfd.readouterr().out


PINS = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(512, 1024))
model = torch.nn.Linear(1024, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(data, batch_size=64, pin_memory=sys.argv[1] == "pinned"):
    x = x.cuda(non_blocking=True)
    model(x).mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_batch_and_its_pinned_copy_are_on_the_host_at_once(tmp_path):
    script = tmp_path / "pins.py"
    script.write_text(PINS)
    data_bytes, batch_bytes = 512 * 1024 * 4, 64 * 1024 * 4
    for word, num_batches in (("pinned", 2), ("plain", 1)):
        found = recorded(script, word, device="t4")
        host = max(each.host_peak_bytes for each in found.spans if each.phase == "steady step")
        assert 0 <= host - data_bytes - num_batches * batch_bytes < 4096
