"""Programs that run on the recording allocator, with the stacks that torch would record."""

from __future__ import annotations

import random

from tests.snapshots.recording_allocator import KIB, MIB, OutOfMemoryError, RecordingAllocator

SITE = "/opt/venv/lib/python3.11/site-packages"


def frame(name: str, filename: str, line: int) -> dict:
    return {"name": name, "filename": filename, "line": line}


MAIN = [
    frame("main", "/home/user/project/train.py", 88),
    frame("<module>", "/home/user/project/train.py", 120),
]
CALL = frame("_call_impl", f"{SITE}/torch/nn/modules/module.py", 1762)


def forward(line: int) -> list[dict]:
    return [
        frame("forward", f"{SITE}/torch/nn/modules/linear.py", 125),
        CALL,
        frame("forward", "/home/user/project/model.py", line),
        CALL,
        *MAIN,
    ]


LOADING = [
    frame("convert", f"{SITE}/torch/nn/modules/module.py", 1329),
    frame("_apply", f"{SITE}/torch/nn/modules/module.py", 915),
    frame("to", f"{SITE}/torch/nn/modules/module.py", 1343),
    *MAIN,
]
BACKWARD = [
    frame("torch::autograd::Engine::evaluate_function(...)", "??", 0),
    frame("torch::autograd::Engine::thread_main(...)", "??", 0),
]
OPTIMIZER = [
    frame("_init_group", f"{SITE}/torch/optim/adamw.py", 110),
    frame("step", f"{SITE}/torch/optim/adamw.py", 232),
    *MAIN,
]
FREED = [frame("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 824), *MAIN]


def steady_training(
    capacity: int = 600 * MIB, *, num_steps: int = 3, num_layers: int = 8, **settings
) -> RecordingAllocator:
    """Some equal steps, then one whose logits do not fit; ends with the failure, as an observer sees it."""
    allocator = RecordingAllocator(capacity, **settings)
    weights = [allocator.malloc(8 * MIB + 4 * KIB, LOADING) for _ in range(num_layers)]
    states: list = []
    for step in range(num_steps + 1):
        kept = [
            allocator.malloc(11 * MIB + 100 * index, forward(20 + index))
            for index in range(num_layers)
        ]
        scratch = allocator.malloc(300 * KIB, forward(40))
        try:
            logits = allocator.malloc((60 if step < num_steps else 400) * MIB, forward(60))
        except OutOfMemoryError:
            return allocator
        gradients = []
        for block in [scratch, logits, *reversed(kept)]:
            if len(gradients) < num_layers:
                gradients.append(allocator.malloc(8 * MIB + 4 * KIB, BACKWARD))
            allocator.free(block, FREED)
        if not states:
            states = [
                allocator.malloc(8 * MIB + 4 * KIB, OPTIMIZER) for _ in range(2 * len(weights))
            ]
        for block in gradients:
            allocator.free(block, MAIN)
    return allocator


def varying_lengths(
    capacity: int = 8192 * MIB,
    *,
    seed: int = 0,
    fill: float = 0.8,
    num_requests: int = 1000,
    **settings,
) -> RecordingAllocator:
    """Caches of ever other lengths that come and go; ends when the pieces between them do not do."""
    allocator = RecordingAllocator(capacity, **settings)
    draw = random.Random(seed)
    for _ in range(6):
        allocator.malloc(250 * MIB, LOADING)
    alive: list = []
    for _ in range(num_requests):
        try:
            alive.append(
                allocator.malloc(draw.randint(1, 60) * 7 * MIB, forward(draw.randint(30, 34)))
            )
            if draw.random() < 0.2:
                allocator.free(allocator.malloc(draw.randint(1, 900) * KIB, forward(50)), FREED)
        except OutOfMemoryError:
            return allocator
        while allocator.allocated > capacity * fill:
            allocator.free(alive.pop(draw.randrange(len(alive))), FREED)
    return allocator
