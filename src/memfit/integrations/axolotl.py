"""A plugin of axolotl: one line of its YAML has a training planned, guarded and fitted.

.. code-block:: yaml

    plugins: [memfit.integrations.axolotl.MemfitPlugin]
    memfit_budget: 22GiB            # all of these may be left out
    memfit_device: rtx-4090-24gb
    memfit_allow: [bf16]
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from memfit.errors import MemfitError

__all__ = ["MemfitArgs", "MemfitPlugin"]  # noqa: F822 - both are made when they are asked for

_PREFIX = "memfit_"
_KEYS = ("budget", "device", "allow", "require", "forbid", "plan", "folder", "guard", "rehearse")


def __getattr__(name: str) -> Any:
    """Make the classes when axolotl asks for them by name: their bases are of other packages."""
    made = {"MemfitArgs": _args_class, "MemfitPlugin": _plugin_class}.get(name)
    if made is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return made()


@cache
def _plugin_class() -> Any:
    """Make the plugin's class.

    Raises:
        MemfitError: if axolotl is not installed.
    """
    try:
        base: Any = import_module("axolotl.integrations.base").BasePlugin
    except ModuleNotFoundError:
        msg = (
            "memfit.integrations.axolotl needs the package axolotl, which is not installed. "
            "Run: pip install axolotl"
        )
        raise MemfitError(msg) from None

    class MemfitPlugin(base):  # type: ignore[misc]  # its package is imported here
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

    return MemfitPlugin


@cache
def _args_class() -> Any:
    """Make the model of the plugin's keys, with pydantic, which axolotl brings."""
    pydantic: Any = import_module("pydantic")
    kinds: dict[str, Any] = {"allow": list[str], "require": list[str], "forbid": list[str]}
    kinds |= {"guard": bool, "rehearse": bool}
    fields = {f"{_PREFIX}{name}": (kinds.get(name, str) | None, None) for name in _KEYS}
    return pydantic.create_model("MemfitArgs", **fields)
