"""A stack tells who asked for memory, and what the program was doing."""

from __future__ import annotations

import pytest
from tests.snapshots.recorded_programs import (
    BACKWARD,
    CALL,
    LOADING,
    MAIN,
    OPTIMIZER,
    SITE,
    forward,
    frame,
)

from memfit.snapshots.stacks import asking

LAYER = frame("forward", f"{SITE}/transformers/models/llama/modeling_llama.py", 212)
WINDOWS = frame("forward", r"C:\Users\me\project\model.py", 7)
STACKS = {
    "a model of one's own": (forward(40), "project/model.py:40 forward", "", "forward"),
    "a model of a library": (
        [frame("forward", f"{SITE}/torch/nn/modules/linear.py", 125), CALL, LAYER, CALL, *MAIN],
        "llama/modeling_llama.py:212 forward", "project/train.py:88 main", "forward",
    ),
    "the optimizer": (OPTIMIZER, "project/train.py:88 main", "", "optimizer"),
    "loading": (LOADING, "project/train.py:88 main", "", "moving or loading"),
    "backward with C++ alone": (
        BACKWARD, "??:0 torch::autograd::Engine::evaluate_function(...)", "", "backward",
    ),
    "backward that computes anew": (
        [*forward(40)[:4], frame("backward", f"{SITE}/torch/autograd/graph.py", 824), *MAIN],
        "project/model.py:40 forward", "", "backward",
    ),
    "a script": ([frame("<module>", "train.py", 3)], "train.py:3 <module>", "", "other"),
    "Windows": ([WINDOWS, CALL], "project/model.py:7 forward", "", "forward"),
    "torch alone": ([CALL], "modules/module.py:1762 _call_impl", "", "forward"),
    "nothing": ([], "", "", "no stack"),
    "compiled code": (
        [frame("call", "/tmp/torchinductor_me/ab/cabc.py", 88), *MAIN],
        "ab/cabc.py:88 call", "", "other",
    ),
    "a name that would colour the terminal": (
        [frame("f\x1b[31m", "/a/b\n.py", 1)], "a/b.py:1 f[31m", "", "other",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(STACKS))
def test_a_stack_tells_who_asked(name) -> None:
    frames, line, called_from, doing = STACKS[name]
    who = asking(frames)

    assert (who.line, who.called_from, who.doing.value) == (line, called_from, doing)


def test_a_stack_of_millions_is_read_at_its_beginning_alone() -> None:
    frames = [CALL] * 199 + MAIN * 1_000_000

    assert asking(frames).line == "project/train.py:88 main"
