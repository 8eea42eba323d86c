"""The loops, by what they keep from step to step; each file adds its own to the collection."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
