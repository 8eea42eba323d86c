"""What is made again of an operator's fake results looks as torch makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from memfit.devices.catalogue import load_device
from memfit.prediction.placed_recorder import card_of
from memfit.virtual import repeated_results
from memfit.virtual.tensors import virtual_tensors

_NUM_CALLS = 4
"""One is new, one comes from torch's cache, and two are made again."""
_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "fresh": lambda one, other: one @ other,
    "scalar": lambda one, other: one * 2 + other.sum(),
    "view": lambda one, other: (one.t(), other[1:, ::2], one.unsqueeze(0)),
    "several views": lambda one, other: torch.split(one + other, 2),
    "reshaped": lambda one, other: one.t().reshape(-1) + other.t().contiguous().view(-1),
    "in place": lambda one, other: (one + 0).add_(other).mul_(2),
    "several results": lambda one, other: (torch.max(one, dim=1), torch.sort(other)),
    "other dtype": lambda one, other: (one > other, one.to(torch.bfloat16), other.half()),
    "broadcast": lambda one, other: one.expand(3, *one.shape) + other[0],
    "normalised": lambda one, other: functional.layer_norm(one, (6,), other[0], other[1]),
    "nothing": lambda one, other: functional.dropout(one, 0.0) + one.new_zeros(0).sum() + other,
    "lists": lambda one, other: torch._foreach_add([one, other], 1.0),
}


def _looks(results: Any, given: tuple[torch.Tensor, ...]) -> list[object]:
    """Describe fake results, and which of them lie in the memory of which."""
    leaves, _ = torch.utils._pytree.tree_flatten(results)
    storages = [each.untyped_storage()._cdata for each in (*given, *leaves)]
    found: list[object] = [[storages.index(each) for each in storages]]
    for leaf in leaves:
        assert type(leaf) is FakeTensor
        attributes = {name: value for name, value in vars(leaf).items() if name != "fake_mode"}
        facts = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.storage_offset())
        state = (leaf.requires_grad, leaf.is_leaf, leaf._is_view(), leaf._version)
        keys = str(torch._C._dispatch_keys(leaf))
        found.append([facts, state, keys, attributes, leaf.untyped_storage().nbytes()])
    return found


@pytest.fixture
def not_made_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have everything made by torch from now on."""

    def replace() -> None:
        monkeypatch.setattr("memfit.virtual.tensors.key_of", lambda *_: None)

    return replace


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", _CALLS)
def test_results_look_as_torch_makes_them(
    name: str, needs_grad: bool, device: str, not_made_again: Callable[[], None]
) -> None:
    def called() -> list[object]:
        one, other = (torch.ones(6, 6, device=device) for _ in range(2))
        one.requires_grad_(needs_grad)
        return _looks(_CALLS[name](one, other), (one, other))

    card = None if device == "cpu" else card_of(load_device("rtx-3060-12gb"))
    with virtual_tensors(card):
        found = [called() for _ in range(_NUM_CALLS)]
        not_made_again()
        assert found == [called()] * _NUM_CALLS


def test_what_torch_has_answered_from_its_cache_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    make = repeated_results._Recipe.make
    monkeypatch.setattr(
        repeated_results._Recipe, "make", lambda *each: made.append(each) or make(*each)
    )
    with virtual_tensors():
        for _ in range(_NUM_CALLS):
            torch.empty(17, 3) @ torch.empty(3, 19)
    assert made


def test_a_made_tensor_belongs_to_the_mode_that_asks() -> None:
    for _ in range(_NUM_CALLS):
        with virtual_tensors() as mode:
            for _ in range(_NUM_CALLS):
                found = torch.empty(5, 7) + 1
                assert isinstance(found, FakeTensor)
                assert found.fake_mode is mode


def test_gradients_flow_through_what_is_made_again() -> None:
    with virtual_tensors():
        for _ in range(_NUM_CALLS):
            weight = torch.ones(4, 4, requires_grad=True)
            product = weight @ weight
            half, rest = product[:2], product[2:]
            half.mul_(2)
            (half.sum() + rest.exp().mean()).backward()
            assert weight.grad is not None
            assert weight.grad.shape == (4, 4)


def test_known_values_are_no_part_of_what_is_made_again() -> None:
    with virtual_tensors():
        for count in range(2, 2 + _NUM_CALLS):
            known = torch.arange(8)[:count]
            assert int(known[-1]) == count - 1
