"""What is planned and predicted, of which trainings, and what is left as it was."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
import lightning as L
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from tests.zoo.lightning_modules import Classifier, difference, fitted, samples, trainer
from torch import nn
from torch.utils.data import DataLoader

from memfit.cli.main import main
from memfit.errors import MemfitError, NoPlanFitsError
from memfit.integrations.lightning import MemfitCallback, plan, predict
from memfit.strategies import ActivationCheckpointing, MicroBatching, OptimizerImplementation
from memfit.strategies.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=12),))


def loader(batch_size: int = 64) -> Any:
    return DataLoader(samples(256), batch_size=batch_size, shuffle=True)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}])
def test_what_is_predicted_is_measured(flags: dict[str, Any]) -> None:
    wide = partial(Classifier, width=400)
    found = predict(trainer(**flags), wide(), loader())
    callback = MemfitCallback(plan=Plan(), rehearse=False)
    trainer(callback, **flags).fit(wide(), loader())

    assert callback.measured_peak_bytes == pytest.approx(found.peak_allocated_bytes, rel=0.01)


@pytest.mark.slow
def test_a_plan_fits_half_of_the_plain_peak_and_is_run() -> None:
    wide = partial(Classifier, width=100)
    data = partial(loader, 256)
    plain = predict(trainer(), wide(), data()).peak_allocated_bytes
    callback = MemfitCallback(budget=int(plain * 0.6), rehearse=False)
    trainer(callback).fit(wide(), data())

    assert callback.plan is not None
    assert callback.plan.splitting is not None
    assert callback.prediction is not None
    assert callback.measured_peak_bytes == pytest.approx(
        callback.prediction.peak_allocated_bytes, rel=0.01
    )
    assert callback.measured_peak_bytes <= plain * 0.6


@pytest.mark.slow
def test_planning_leaves_module_trainer_and_random_states_alone() -> None:
    module, made = Classifier(), trainer()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    state, callbacks = torch.get_rng_state(), [*made.callbacks]
    found = plan(made, module, loader(), budget="1GiB")

    assert found.prediction is not None
    assert torch.equal(state, torch.get_rng_state())
    assert made.callbacks == callbacks
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    assert not module.hooks
    assert not module.losses
    L.seed_everything(0, verbose=False)
    again = Classifier()
    L.seed_everything(0, verbose=False)
    module.load_state_dict(again.state_dict())
    for trained, its_trainer in ((module, made), (again, trainer())):
        torch.manual_seed(1)
        its_trainer.fit(trained, loader())
    assert difference(module, again) == 0


@pytest.mark.slow
def test_a_budget_that_nothing_fits_is_an_error_before_training() -> None:
    with pytest.raises(NoPlanFitsError):
        plan(trainer(), Classifier(), loader(), budget="1KiB")


@pytest.mark.slow
def test_the_command_plans_for_a_trainer(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "training.py"
    file.write_text(
        "from tests.integrations.lightning.test_planning import Classifier, loader, trainer\n"
        "def make():\n    return trainer(), Classifier(), loader()\n"
    )

    assert main(["plan", f"{file}:make", "--budget", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


@pytest.mark.slow
def test_checkpoints_go_on_in_either_training(tmp_path: Any) -> None:
    kept = {}
    for name, callbacks in (("plain", ()), ("split", (MemfitCallback(plan=SPLIT),))):
        writer = ModelCheckpoint(dirpath=tmp_path / name, save_last=True)
        fitted(Classifier, *callbacks, writer, enable_checkpointing=True)
        kept[name] = tmp_path / name / "last.ckpt"
    plain, split = (torch.load(path, weights_only=False) for path in kept.values())

    assert plain.keys() == split.keys()
    assert plain["loops"] == split["loops"]
    assert "memfit" not in str(split)
    goals = [resumed(kept["plain"]), resumed(kept["split"]), resumed(kept["plain"], SPLIT)]
    assert max(difference(goals[0], each) for each in goals[1:]) < 1e-12


def resumed(checkpoint: Any, plan: Plan | None = None) -> Any:
    callbacks = [] if plan is None else [MemfitCallback(plan=plan)]
    L.seed_everything(0, verbose=False)
    module, made = Classifier(), trainer(*callbacks, max_epochs=4, precision="64-true")
    data = DataLoader(samples(100, torch.float64), batch_size=32, shuffle=True)
    made.fit(module, data, ckpt_path=checkpoint)
    return module


class Finetuned(Classifier):
    """A classifier whose first layer is a backbone that is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        return super().training_step((self.backbone(inputs), labels), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.slow
def test_other_parameters_from_some_epoch_on_are_planned_anew() -> None:
    kinds = {"unfreeze_backbone_at_epoch": 1, "lambda_func": lambda epoch: 1.0}
    plain, _ = fitted(Finetuned, BackboneFinetuning(**kinds))
    callback = MemfitCallback("1GiB", require=["micro-batching"])
    split, _ = fitted(Finetuned, BackboneFinetuning(**kinds), callback)

    assert difference(plain, split) < 1e-12
    assert callback.num_plans == 2


def test_optimization_by_hand_is_refused_with_what_there_is_instead() -> None:
    class ByHand(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(MemfitError, match="optimizes by hand"):
        fitted(ByHand, MemfitCallback("1GiB"))
    refusals: list[str] = []
    fitted(ByHand, MemfitCallback("1GiB", on_refusal=refusals.append))
    assert len(refusals) == 1
    plain, _ = fitted(ByHand)
    blocks = Plan(strategies=(ActivationCheckpointing(blocks=("net",)),))
    attached, _ = fitted(ByHand, MemfitCallback(plan=blocks))
    assert difference(plain, attached) == 0


@pytest.mark.slow
def test_a_checkpoint_does_not_say_how_the_optimizer_was_run(tmp_path: Any) -> None:
    plan = Plan(strategies=(OptimizerImplementation(implementation="foreach"),))
    writer = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    _, made = fitted(Classifier, MemfitCallback(plan=plan), writer, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)

    assert saved["optimizer_states"][0]["param_groups"][0]["foreach"] is None
    assert made.optimizers[0].param_groups[0]["foreach"] is None


def test_a_strategy_that_the_loop_has_no_place_for_says_who_has() -> None:
    with pytest.raises(MemfitError, match=r"memfit\.start offers it"):
        plan(trainer(), Classifier(), loader(), require=["optimizer-in-backward"])


@pytest.mark.slow
def test_a_step_whose_log_chooses_by_values_is_predicted() -> None:
    class Asking(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, labels = batch
            logits = self.net(inputs)
            self.log("share", (logits.argmax(-1) == labels)[labels > 0].float().mean())
            return nn.functional.cross_entropy(logits, labels)

    found = predict(trainer(), Asking(), loader())

    assert found.peak_allocated_bytes > 0


@pytest.mark.slow
def test_a_step_without_a_loss_before_training_says_so() -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(MemfitError, match="training_step returned None"):
        fitted(Skipping, MemfitCallback(plan=SPLIT))


@pytest.mark.slow
def test_pieces_that_disagree_about_a_loss_are_an_error() -> None:
    class Choosy(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step and batch[0][-1, 0] < 0:
                return None  # a whole batch asks its last sample, a piece asks its own
            return super().training_step(batch, batch_idx)

    with pytest.raises(MemfitError, match="for some pieces of a batch and not for others"):
        fitted(Choosy, MemfitCallback(plan=SPLIT, rehearse=False), max_epochs=4)


@pytest.mark.slow
def test_a_batch_of_which_no_piece_has_a_loss_is_skipped() -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            pass

    plain, _ = fitted(Skipping)
    cut, _ = fitted(Skipping, MemfitCallback(plan=SPLIT, rehearse=False))
    for one, other in zip(plain.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
