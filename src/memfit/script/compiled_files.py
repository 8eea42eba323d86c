"""Diverts the files of compiled libraries, which do not open them through Python."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from memfit.script.overlay import Overlay

READS, WRITES = "reads", "writes"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Method:
    """A method of a compiled class, and what it does with its first argument, a path or several."""

    module: str
    owner: str
    name: str
    does: str
    is_static: bool = False


_MODELS = ("BPE", "WordLevel", "WordPiece")
_METHODS: Sequence[_Method] = (
    _Method(module="tokenizers", owner="Tokenizer", name="save", does=WRITES),
    _Method(module="tokenizers", owner="Tokenizer", name="train", does=READS),
    _Method(module="tokenizers", owner="Tokenizer", name="from_file", does=READS, is_static=True),
    *(
        _Method(module="tokenizers.models", owner=model, name=name, does=READS, is_static=True)
        for model in _MODELS
        for name in ("from_file", "read_file")
    ),
    *(
        _Method(module="tokenizers.models", owner=model, name="save", does=WRITES)
        for model in (*_MODELS, "Unigram")
    ),
    _Method(module="sentencepiece", owner="SentencePieceProcessor", name="Load", does=READS),
    _Method(module="h5py", owner="File", name="__init__", does=WRITES),
    _Method(module="sqlite3", owner="", name="connect", does=WRITES),
)


def compiled_files(overlay: Overlay) -> Iterator[Any]:
    """Yield what sends the paths of compiled libraries through an overlay, where installed.

    Limits: of a library that is not listed, files that the script has written itself are not found
    by it, and what it writes is refused by the kernel (``kernel_lock``).
    """
    for method in _METHODS:
        if importlib.util.find_spec(method.module.partition(".")[0]) is None:
            continue
        module = importlib.import_module(method.module)
        owner = getattr(module, method.owner, None) if method.owner else module
        if owner is None or not hasattr(owner, method.name):
            continue
        diverted = _diverted(overlay, getattr(owner, method.name), method)
        replacement = staticmethod(diverted) if method.is_static else diverted
        yield patch.object(owner, method.name, replacement)


def _diverted(overlay: Overlay, real: Callable[..., Any], method: _Method) -> Callable[..., Any]:
    place = 0 if method.is_static or not method.owner else 1
    place_of = overlay.for_writing if method.does == WRITES else overlay.for_reading

    def mapped(path: Any) -> Any:
        if isinstance(path, (list, tuple)):
            return [mapped(each) for each in path]
        is_path = isinstance(path, str) and not path.startswith((":", "file:"))
        return place_of(path) if is_path else path

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [mapped(each) if at == place else each for at, each in enumerate(args)]
        return real(*given, **kwargs)

    return call
