"""An update that runs out of memory is undone and run again; nobody can tell from the weights."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")
import lightning as L
from tests.zoo.lightning_modules import Classifier, difference, fitted
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.integrations.lightning import MemfitCallback
from memfit.live_state.harmless import Instrument
from memfit.strategies import MicroBatching
from memfit.strategies.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=12),))
FORWARD, BACKWARD = "aten.addmm.default", "aten.threshold_backward.default"
UPDATE, CLIPPING = "aten.add_.Tensor", "aten.linalg_vector_norm.default"


class _Shortage(TorchDispatchMode, Instrument):
    """Raise what the CPU's allocator raises, once, at the call of an operator."""

    def __init__(self, operator: str, number: int) -> None:
        super().__init__()
        self._operator, self._left = operator, number
        self.has_struck = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = any(isinstance(each, FakeTensor) for each in args)
        if str(func) == self._operator and not self.has_struck and not is_fake:
            self._left -= 1
            if self._left < 0:
                self.has_struck = True
                msg = "[enforce fail] DefaultCPUAllocator: can't allocate memory"
                raise RuntimeError(msg)
        return func(*args, **(kwargs or {}))


class Shortage(L.Callback):
    """Have memory run out in one batch."""

    def __init__(self, operator: str, *, batch: int, number: int = 0) -> None:
        self._mode = _Shortage(operator, number)
        self._batch = batch

    @property
    def has_struck(self) -> bool:
        return self._mode.has_struck

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self._batch:
            self._mode.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self._batch:
            self._mode.__exit__(None, None, None)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self.on_train_batch_end(trainer)


@pytest.mark.parametrize(
    ("operator", "number", "place"),
    [
        (FORWARD, 0, "forward"),
        (FORWARD, 3, "forward"),
        (BACKWARD, 1, "backward"),
        (CLIPPING, 0, "optimizer"),
        (UPDATE, 12, "optimizer"),
    ],
)
def test_a_shortage_anywhere_leaves_the_same_weights(
    operator: str, number: int, place: str
) -> None:
    plain, _ = fitted(Classifier, gradient_clip_val=0.5)
    shortage = Shortage(operator, batch=2, number=number)
    callback = MemfitCallback(plan=SPLIT, rehearse=False)
    module, trainer = fitted(Classifier, callback, shortage, gradient_clip_val=0.5)

    assert shortage.has_struck
    assert [event.phase for event in callback.events] == [place]
    assert callback.plan is not None
    assert callback.plan.labels() == ("micro-batching(6)",)
    assert difference(plain, module) < 1e-12
    assert module.losses == pytest.approx(plain.losses, abs=1e-12)
    assert trainer.global_step == 8


@pytest.mark.parametrize("operator", [FORWARD, BACKWARD, UPDATE])
def test_the_batches_of_a_window_are_run_again(operator: str) -> None:
    plain, _ = fitted(Classifier, accumulate_grad_batches=2)
    shortage = Shortage(operator, batch=5, number=1)
    module, _ = fitted(
        Classifier,
        MemfitCallback(plan=SPLIT, rehearse=False),
        shortage,
        accumulate_grad_batches=2,
    )

    assert shortage.has_struck
    assert difference(plain, module) < 1e-12
    assert module.losses == pytest.approx(plain.losses, abs=1e-12)


def test_a_shortage_in_the_rehearsal_is_found_before_the_first_batch() -> None:
    class Early(Shortage):
        def on_train_start(self, *_: Any) -> None:
            self._mode.__enter__()

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 0:
                self._mode.__exit__(None, None, None)

        def on_train_batch_start(self, *_: Any) -> None:
            pass

        on_train_batch_end = on_train_batch_start

    plain, _ = fitted(Classifier)
    shortage = Early(BACKWARD, batch=0)
    callback = MemfitCallback(plan=SPLIT)
    module, _ = fitted(Classifier, shortage, callback)

    assert shortage.has_struck
    assert len(callback.events) == 1
    assert difference(plain, module) < 1e-12
    assert module.hooks == plain.hooks


def test_without_a_guard_the_shortage_ends_the_training() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        fitted(Classifier, MemfitCallback(plan=SPLIT, guard=False), Shortage(BACKWARD, batch=1))


def test_an_error_of_the_module_stays_what_it_is() -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 2 and self.losses:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError, match="mine"):
        fitted(Failing, MemfitCallback(plan=SPLIT))
