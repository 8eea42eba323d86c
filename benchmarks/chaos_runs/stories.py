"""What one run is, drawn from a number: a job, a plan, how it is saved, and what befalls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, Self

from chaos_runs.system_calls import Blow

MEMORY, KILL, DISK, CLOCK, RANKS, CONFIG, COMMAND, BUDGET = KINDS = (
    *("memory", "kill", "disk", "clock", "ranks", "config", "command", "budget"),
)
_WEIGHTS = {MEMORY: 21, KILL: 15, DISK: 13, CLOCK: 4, RANKS: 16, CONFIG: 27, COMMAND: 3, BUDGET: 1}
"""How often each kind is drawn, of a hundred."""
OF_MEMORY, OF_FILES, OF_CLOCK, OF_RANK, OF_ERROR, OF_STALL, OF_PIPE = (
    *("memory", "files", "clock", "lost rank", "error", "stall", "pipe"),
)

LAYERS = (
    *("linear", "mlp", "norm", "batch norm", "dropout", "attention", "convolution", "recurrent"),
    *("frozen", "tied", "counting", "noise", "python noise", "moving average"),
)
DRAWS_RANDOM = {"dropout", "noise", "python noise"}
MIXES_SAMPLES = {"batch norm", "moving average", "counting", "tied"}
LOSSES = ("classes", "squares", "total", "ragged total", "contrast", "smooth", "program")
OPTIMIZERS = (
    *("sgd", "momentum", "adam", "adamw", "fused adamw", "foreach adamw", "rmsprop", "adagrad"),
    *("nadam", "adamax", "two groups"),
)
LOADERS = ("list", "ragged", "shuffled", "dict", "refilled")
WORDINGS = ("type", "cuda", "cpu allocator", "python", "cublas")
_HURTS = (Blow.FULL, Blow.FULL, Blow.PARTLY, Blow.BRIEFLY, Blow.READ_ONLY, Blow.QUOTA, Blow.BROKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A training step, in words."""

    seed: int
    layers: tuple[str, ...]
    width: int
    loss: str
    optimizer: str
    loader: str
    dtype: str = "fp32"
    clips: bool = False
    batch_size: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong.

    Args:
        kind: one of the ``OF_`` words.
        at: when, as a share of the operators or calls of the undisturbed run.
        how: the blow, the wording of an error, or the jump of a clock.
        is_late: whether an operator has done its work before it fails.
        area: of the disk: ``work`` or ``tmp``.
        rank: whom it befalls.
    """

    kind: str
    at: float
    how: str = ""
    is_late: bool = False
    area: str = "work"
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One run."""

    seed: int
    kind: str
    job: JobSpec
    strategies: tuple[Mapping[str, Any], ...] = ()
    ladder: str = "same"
    """What the guard goes on with: ``same`` plans, or ``pieces`` that it finds itself."""
    num_steps: int = 4
    saves: str = "shards"
    """How checkpoints are written: ``shards``, ``file`` or ``none``."""
    save_every: int = 2
    has_journal: bool = True
    num_ranks: int = 1
    shares: str = ""
    """How ranks share the work: ``averaged``, ``sharded`` (by the job), ``ddp`` or ``fsdp2``."""
    lives: tuple[tuple[Fault, ...], ...] = ()
    """What befalls each process in turn, before the one that nothing befalls."""
    words: str = ""
    """Of a command, or what is done to configuration files."""
    budget_fraction: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Make it of plain values."""
        lives = tuple(tuple(Fault(**fault) for fault in life) for life in content["lives"])
        job = {**content["job"], "layers": tuple(content["job"]["layers"])}
        own = {"job": JobSpec(**job), "lives": lives, "strategies": tuple(content["strategies"])}
        return cls(**{**content, **own})

    @property
    def faults(self) -> tuple[Fault, ...]:
        """List all that befalls it."""
        return tuple(fault for life in self.lives for fault in life)


def draw(seed: int) -> Story:
    """Draw a story; the same for the same number."""
    chance = Random(f"chaos {seed}")
    kind = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0]
    story = Story(
        seed=seed,
        kind=kind,
        job=_job(chance),
        num_steps=chance.randint(2, 6),
        saves=chance.choice(["shards", "shards", "file", "none"]),
        save_every=chance.choice([1, 2, 2, 3]),
        has_journal=chance.random() < 0.7,
    )
    story = replace(story, strategies=_strategies(chance, story.job))
    return _MAKERS[kind](chance, story)


def _job(chance: Random) -> JobSpec:
    layers = tuple(chance.choice(LAYERS) for _ in range(chance.randint(1, 4)))
    return JobSpec(
        seed=chance.randrange(10**6),
        layers=layers,
        width=chance.choice([4, 6, 8, 12]),
        loss=chance.choice(LOSSES),
        optimizer=chance.choice(OPTIMIZERS),
        loader=chance.choice(LOADERS),
        dtype=chance.choice(["fp32", "fp32", "fp64"]),
        clips=chance.random() < 0.3,
        batch_size=chance.choice([6, 8, 8, 12]),
    )


def _strategies(chance: Random, job: JobSpec) -> tuple[Mapping[str, Any], ...]:
    pieces = {"micro_batch_size": chance.choice([2, 3, 4])}
    implementation = {"implementation": chance.choice(["fused", "foreach"])}
    off = {"to": "disk", "min_tensor_bytes": 1}
    known: list[tuple[str, Mapping[str, Any]]] = [
        ("activation-checkpointing", {}),
        ("activation-checkpointing", {"blocks": ["blocks.0"]}),
        (chance.choice(["micro-batching", "batchnorm-replay", "cached-gradients"]), pieces),
        ("optimizer-in-backward", {}),
        ("optimizer-offload", off),
        ("activation-offload", off),
        ("frozen-offload", off),
        ("optimizer-implementation", implementation),
        ("fused-attention", {}),
        ("tiling", {"num_tiles": 2}),
        ("bf16", {}),
        ("fp16", {}),
        ("pure-bf16", {}),
    ]
    del job
    chosen = [chance.choice(known) for _ in range(chance.choice([0, 0, 0, 1, 1, 2, 3]))]
    return tuple({"name": name, **settings} for name, settings in chosen)


_OF_RANKS = ("activation-checkpointing", "optimizer-implementation", "bf16", "activation-offload")


def _memory_fault(chance: Random, rank: int = 0) -> Fault:
    return Fault(
        kind=OF_MEMORY,
        at=chance.random(),
        how=chance.choice(WORDINGS),
        is_late=chance.random() < 0.4,
        rank=rank,
    )


def _file_fault(chance: Random, blows: tuple[Blow, ...], rank: int = 0) -> Fault:
    area = chance.choice(["work", "work", "work", "tmp"])
    return Fault(
        kind=OF_FILES, at=chance.random(), how=str(chance.choice(blows)), area=area, rank=rank
    )


def _with_memory(chance: Random, story: Story) -> Story:
    lives = tuple(_memory_fault(chance) for _ in range(chance.choice([1, 1, 2, 3])))
    if chance.random() < 0.15:
        lives = (*lives, _file_fault(chance, (Blow.FULL, Blow.BRIEFLY, Blow.BROKEN)))
    if chance.random() < 0.08:
        plain_job = replace(
            story.job,
            layers=tuple(
                each if each not in DRAWS_RANDOM | MIXES_SAMPLES else "mlp"
                for each in story.job.layers
            ),
            loss=chance.choice(["classes", "squares", "total"]),
            optimizer=chance.choice(["sgd", "momentum"]),
            dtype="fp64",
        )
        story = replace(story, ladder="pieces", job=plain_job, strategies=())
    return replace(story, lives=(lives,))


def _killed(chance: Random, story: Story) -> Story:
    blows = (Blow.KILL, Blow.KILL, Blow.TEAR)
    lives = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        faults = [_file_fault(chance, blows)]
        if chance.random() < 0.2:
            faults.append(_memory_fault(chance))
        lives.append(tuple(faults))
    return replace(story, lives=tuple(lives), **_saving(chance, story))


def _on_a_bad_disk(chance: Random, story: Story) -> Story:
    lives = []
    for _ in range(chance.choice([1, 1, 2])):
        faults = [_file_fault(chance, (*_HURTS, Blow.SHORT))]
        if chance.random() < 0.3:
            faults.append(_memory_fault(chance))
        lives.append(tuple(faults))
    return replace(story, lives=tuple(lives), **_saving(chance, story))


def _saving(chance: Random, story: Story) -> dict[str, str]:
    return {"saves": chance.choice(["shards", "file"]) if story.saves == "none" else story.saves}


def _under_a_jumping_clock(chance: Random, story: Story) -> Story:
    jumps = ("year back", "year on", "hour back", "to the epoch", "to 2100", "asleep", "still")
    faults = [
        Fault(kind=OF_CLOCK, at=chance.random(), how=chance.choice(jumps))
        for _ in range(chance.choice([1, 2, 3]))
    ]
    if chance.random() < 0.5:
        faults.append(_memory_fault(chance))
    return replace(story, lives=(tuple(faults),))


def _among_ranks(chance: Random, story: Story) -> Story:
    num_ranks = chance.choice([2, 2, 2, 4])
    shares = chance.choices(["averaged", "sharded", "ddp", "fsdp2"], [45, 35, 10, 10])[0]
    rank = chance.randrange(num_ranks)
    which = chance.choice([OF_MEMORY, OF_MEMORY, OF_RANK, OF_RANK, OF_FILES, OF_ERROR, OF_STALL])
    fault = Fault(kind=which, at=chance.random(), rank=rank)
    if which == OF_MEMORY:
        fault = _memory_fault(chance, rank)
    elif which == OF_FILES:
        fault = _file_fault(chance, (*_HURTS, Blow.KILL, Blow.TEAR), rank)
    layers = tuple(
        "mlp" if each in MIXES_SAMPLES | {"recurrent"} else each for each in story.job.layers
    )
    job = replace(
        story.job,
        layers=layers,
        loss=chance.choice(["classes", "squares", "total", "ragged total"]),
        loader="list",
        batch_size=12,
    )
    return replace(
        story,
        num_ranks=num_ranks,
        shares=shares,
        job=job,
        strategies=tuple(each for each in story.strategies if each["name"] in _OF_RANKS)[:1],
        saves=chance.choice(["shards", "shards", "none"]),
        num_steps=min(story.num_steps, 4),
        lives=((fault,),),
    )


def _with_configs(chance: Random, story: Story) -> Story:
    blows = (Blow.KILL, Blow.KILL, Blow.TEAR, *_HURTS, Blow.SHORT)
    lives = tuple(
        (Fault(kind=OF_FILES, at=chance.random(), how=str(chance.choice(blows))),)
        for _ in range(chance.choice([1, 1, 2, 3]))
    )
    return replace(story, lives=lives, words=chance.choice(["apply", "undo", "apply undo"]))


def _by_command(chance: Random, story: Story) -> Story:
    blows = (Blow.KILL, Blow.TEAR, *_HURTS, Blow.SHORT)
    pipe = Fault(kind=OF_PIPE, at=chance.random(), how=chance.choice(["out", "out", "err", "both"]))
    files = Fault(kind=OF_FILES, at=chance.random(), how=str(chance.choice(blows)))
    fault = chance.choice([pipe, files, files])
    words = chance.choice([*["run"] * 5, *["report"] * 4, "predict", "plan", "devices", "measure"])
    return replace(story, lives=((fault,),), words=words)


def _inside_a_budget(chance: Random, story: Story) -> Story:
    fault = (_memory_fault(chance),) if chance.random() < 0.6 else ()
    job = replace(story.job, batch_size=32, width=12)
    return replace(
        story, job=job, lives=(fault,), budget_fraction=chance.choice([0.6, 0.7, 0.8, 0.9])
    )


_MAKERS = {
    MEMORY: _with_memory,
    KILL: _killed,
    DISK: _on_a_bad_disk,
    CLOCK: _under_a_jumping_clock,
    RANKS: _among_ranks,
    CONFIG: _with_configs,
    COMMAND: _by_command,
    BUDGET: _inside_a_budget,
}
