"""A window that runs out of memory is undone and run again; nobody can tell from the weights."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
from tests.zoo.trainers import difference, losses, texts, trainer
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from memfit.errors import MemfitError
from memfit.integrations.transformers import attach
from memfit.live_state.harmless import Instrument
from memfit.strategies import ActivationCheckpointing, MicroBatching
from memfit.strategies.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=4),))
FORWARD, BACKWARD = "aten.addmm.default", "aten.native_layer_norm_backward.default"
UPDATE, CLIPPING = "aten.addcdiv_.default", "aten.linalg_vector_norm.default"


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


class Shortage(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Have memory run out in one window."""

    def __init__(self, operator: str, number: int = 0, step: int = 1) -> None:
        self.mode = _Shortage(operator, number)
        self._step, self._is_on = step, False

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self._step:
            self.mode.__enter__()
            self._is_on = True

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._is_on:
            self.mode.__exit__(None, None, None)
            self._is_on = False


def pair(shortage: Shortage, name: str = "bert", **options: Any) -> tuple[Any, Any, Any]:
    """Train alone, and under a plan with a shortage."""
    options = {"train_dataset": texts(24), **options}
    plain = trainer(name, **options)
    plain.train()
    made = trainer(name, callbacks=[shortage], **options)
    attached = attach(made, plan=SPLIT, rehearse=False)
    try:
        made.train()
    finally:
        shortage.on_step_end()
    return plain, made, attached


@pytest.mark.parametrize(
    ("operator", "number", "place"),
    [
        (FORWARD, 0, "forward"),
        (FORWARD, 10, "forward"),
        (BACKWARD, 1, "backward"),
        (CLIPPING, 0, "optimizer"),
        (UPDATE, 0, "optimizer"),
        (UPDATE, 12, "optimizer"),
    ],
)
def test_a_shortage_anywhere_leaves_the_same_weights(
    operator: str, number: int, place: str
) -> None:
    shortage = Shortage(operator, number)
    plain, made, attached = pair(shortage)

    assert shortage.mode.has_struck
    assert [event.phase for event in attached.events if hasattr(event, "phase")] == [place]
    assert attached.plan is not None
    assert attached.plan.labels() == ("micro-batching(2)",)
    assert difference(plain.model, made.model) < 1e-12
    assert losses(made) == pytest.approx(losses(plain), abs=2e-6)
    assert made.state.global_step == plain.state.global_step == 3


@pytest.mark.parametrize(
    ("operator", "number"), [(FORWARD, 20), (BACKWARD, 7), (CLIPPING, 0), (UPDATE, 3)]
)
def test_the_batches_of_a_window_are_run_again(operator: str, number: int) -> None:
    shortage = Shortage(operator, number)
    options = {"gradient_accumulation_steps": 2, "train_dataset": texts(40)}
    plain, made, attached = pair(shortage, **options)

    assert shortage.mode.has_struck
    assert len([event for event in attached.events if hasattr(event, "phase")]) == 1
    assert difference(plain.model, made.model) < 1e-12


def test_dropout_is_drawn_again() -> None:
    """A plan that does not cut draws the masks of the first try when the window is run again."""
    from tests.zoo.trainers import bert

    def with_dropout() -> Any:
        model = bert()
        for module in model.modules():
            if type(module).__name__ == "Dropout":
                module.p = 0.3
        return model

    plain = trainer("bert", model=with_dropout())
    plain.train()
    blocks = ActivationCheckpointing(blocks=("bert.encoder.layer.0",))
    shortage = Shortage(UPDATE, 5)
    made = trainer("bert", model=with_dropout(), callbacks=[shortage])
    attached = attach(made, plan=Plan(ladder=(Plan(strategies=(blocks,)),)), rehearse=False)
    made.train()

    assert shortage.mode.has_struck
    assert attached.plan is not None
    assert attached.plan.labels() == (blocks.label(),)
    assert difference(plain.model, made.model) < 1e-12


def test_without_a_guard_the_shortage_ends_the_training() -> None:
    shortage = Shortage(BACKWARD)
    made = trainer("bert", callbacks=[shortage])
    attach(made, plan=SPLIT, guard=False)
    try:
        with pytest.raises(MemfitError, match="outside of a window"):
            made.train()
    finally:
        shortage.on_step_end()


def test_the_batch_size_is_not_searched_for() -> None:
    """What the Trainer would answer with a smaller batch and a new start is answered here."""
    shortage = Shortage(FORWARD, 5)
    plain, made, _ = pair(shortage, auto_find_batch_size=True)

    assert shortage.mode.has_struck
    assert made._train_batch_size == 8
    assert difference(plain.model, made.model) < 1e-12


def test_an_error_of_the_trainer_stays_what_it_is() -> None:
    from transformers import Trainer

    class Failing(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 2:
                raise KeyError("mine")
            return super().compute_loss(model, inputs, *args, **kwargs)

    made = trainer("bert", Failing)
    attach(made, plan=SPLIT)
    with pytest.raises(KeyError, match="mine"):
        made.train()


def test_an_evaluation_that_does_not_fit_goes_on_in_pieces() -> None:
    options = {"eval_dataset": texts(11), "compute_metrics": _accuracy}
    plain = trainer("bert", **options)
    plain.train()
    expected = plain.evaluate()
    made = trainer("bert", **options)
    found: dict[str, float] = {}
    shortage = _Shortage("aten.addmm.default", 3)

    class Evaluating(TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            with shortage:
                found.update(made.evaluate())

    made.add_callback(Evaluating())
    attached = attach(made, plan=SPLIT)
    made.train()

    assert shortage.has_struck
    assert [event.phase for event in attached.events] == ["evaluation"]
    for name in ("eval_loss", "eval_accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-9)


def _accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}
