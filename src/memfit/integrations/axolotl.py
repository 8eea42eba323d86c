"""A plugin of axolotl: one line of its YAML has a training planned, guarded and fitted.

.. code-block:: yaml

    plugins: [memfit.integrations.axolotl.MemfitPlugin]
    memfit_budget: 22GiB            # all of these may be left out
    memfit_device: rtx-4090-24gb
    memfit_allow: [bf16]
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from memfit.errors import MissingExtraError

__all__ = ["MemfitPlugin"]

_PREFIX = "memfit_"
_KEYS = ("budget", "device", "allow", "require", "forbid", "plan", "folder", "guard", "rehearse")


def _base() -> Any:
    """Return axolotl's base class of plugins.

    Raises:
        MissingExtraError: if axolotl is not installed.
    """
    try:
        return import_module("axolotl.integrations.base").BasePlugin
    except ModuleNotFoundError:
        feature = "memfit.integrations.axolotl"
        raise MissingExtraError(feature, "axolotl", "transformers]' 'axolotl") from None


_Base: Any = _base()


class MemfitPlugin(_Base):  # type: ignore[misc]  # its package is imported here
    """Attach memfit to the trainer that axolotl makes."""

    def __init__(self) -> None:
        super().__init__()
        self.attached: Any = None
        """What has the plan, its prediction and what happened."""

    def get_input_args(self) -> str:
        """Name the model of the keys that the configuration may have."""
        return "memfit.integrations.axolotl.MemfitArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Have the trainer plan when its training begins."""
        attach = import_module("memfit.integrations.transformers").attach
        given = {name: cfg.get(f"{_PREFIX}{name}") for name in _KEYS}
        wanted = {name: value for name, value in given.items() if value is not None}
        self.attached = attach(trainer, **wanted)


def _args() -> Any:
    """Make the model of the plugin's keys, with pydantic, which axolotl brings."""
    pydantic: Any = import_module("pydantic")
    kinds = {"allow": list[str], "require": list[str], "forbid": list[str], "guard": bool}
    fields = {
        f"{_PREFIX}{name}": (kinds.get(name, bool if name == "rehearse" else str) | None, None)
        for name in _KEYS
    }
    return pydantic.create_model("MemfitArgs", **fields)


def __getattr__(name: str) -> Any:
    if name == "MemfitArgs":
        return _args()
    raise AttributeError(name)
