"""The plugin attaches to the trainer that axolotl makes; a stand-in takes axolotl's place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformers")
from memfit.errors import MemfitError


class _BasePlugin:
    """The hooks of axolotl's class that are used, by its own names."""

    def get_input_args(self) -> str | None:
        return None

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        pass


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = _BasePlugin  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "memfit.integrations.axolotl", raising=False)
    yield importlib.import_module("memfit.integrations.axolotl")
    sys.modules.pop("memfit.integrations.axolotl", None)


@pytest.mark.slow
def test_the_plugin_attaches_with_the_keys_of_the_configuration(plugins: Any) -> None:
    from tests.zoo.trainers import trainer

    made = trainer("bert", max_steps=1)
    plugin = plugins.MemfitPlugin()
    plugin.post_trainer_create({"memfit_budget": "1GiB", "memfit_rehearse": False}, made)
    made.train()

    prediction = plugin.attached.prediction
    assert prediction is not None
    assert prediction.budget_bytes == 1 << 30


def test_the_keys_are_a_model_of_pydantic(plugins: Any) -> None:
    assert plugins.MemfitPlugin().get_input_args() == "memfit.integrations.axolotl.MemfitArgs"
    assert plugins.MemfitArgs(memfit_budget="2GiB").memfit_allow is None


def test_without_axolotl_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", None)
    monkeypatch.delitem(sys.modules, "memfit.integrations.axolotl", raising=False)

    axolotl = importlib.import_module("memfit.integrations.axolotl")
    with pytest.raises(MemfitError, match="pip install axolotl"):
        axolotl.MemfitPlugin  # noqa: B018 - to look it up is what axolotl does
