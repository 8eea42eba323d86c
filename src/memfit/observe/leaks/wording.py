"""Says what leaks in words, and what to do about it."""

from __future__ import annotations

from memfit.units import format_bytes

from .nodes import Node
from .rules import Growth
from .walk import Look

_REMEDIES = {
    "metric-state": (
        "Call reset() on it after each pass, or compute on batches and keep the result alone."
    ),
    "autograd-graph": (
        "It keeps the graph of every step: add loss.item() or keep x.detach(), and evaluate "
        "under torch.no_grad()."
    ),
    "hooks": "Register the hook once, or keep its handle and call handle.remove() after the step.",
    "parameters": "Register parameters once, outside the step.",
    "optimizer-groups": "Call add_param_group() once, or make a new optimizer.",
    "lru-cache": (
        "Tensors are compared as objects, so no call finds its result again: take the cache off, "
        "or give it a maxsize."
    ),
    "traceback": (
        "An exception holds the frames it went through with all their variables: keep str(error), "
        "or clear error.__traceback__."
    ),
    "dataset": "Bound what the dataset keeps, or keep it as arrays made once.",
    "class-attribute": "It is shared by all instances: make it an attribute of one, or clear it.",
    "closure": "Clear it after each pass, or return what is needed.",
    "pinned-memory": "Pinned memory is never swapped: make buffers once and copy into them.",
    "reference-cycle": (
        "The objects refer to each other, and only the garbage collector frees them: run "
        "gc.collect() now and then, or break the cycle with weakref.ref."
    ),
    "worker-memory": (
        "Each worker has its own copy of the dataset: keep no results in it, or use "
        "persistent_workers=False."
    ),
    "native": "Look among C extensions and caches of libraries, such as compiled shapes.",
}
_KEPT = "Clear it after each pass, or keep .item(), .detach().cpu() or a running value."


def kind_of(growth: Growth, look: Look) -> str:
    """Name the kind of leak."""
    if growth.kind:
        return growth.kind
    node = growth.node
    chain = node.lineage()
    tests = (
        ("pinned-memory", node.is_pinned),
        ("lru-cache", any(each.kind == "lru_cache" for each in chain)),
        ("traceback", _holds_exceptions(node, look)),
        ("metric-state", any(each.type_name.startswith("Metric ") for each in chain)),
        ("dataset", node.owner("dataset") is not None),
        ("class-attribute", any(each.style == "class" for each in chain)),
        ("closure", any(each.style == "closure" for each in chain)),
    )
    return next((kind for kind, applies in tests if applies), node.kind)


def _holds_exceptions(node: Node, look: Look) -> bool:
    kinds = {"exception", "traceback"}
    if any(each.kind in kinds for each in node.lineage()):
        return True
    return any(each.kind in kinds and node in each.lineage()[-3:] for each in look.nodes.values())


def sentence_of(kind: str, holder: str, growth: Growth, line: str, others: tuple[str, ...]) -> str:
    """Write what grows, by how much, and what to do."""
    rate = growth.num_bytes / max(1, growth.num_boundaries)
    over = (
        f"over {growth.num_passes} passes" if growth.num_passes else f"in {growth.num_boundaries}"
    )
    steps = "" if growth.num_passes else " steps"
    made = f"; what it holds is made at {line}" if line else ""
    also = f" (and {', '.join(others)})" if others else ""
    items = "" if growth.node.kind not in {"list", "dict", "set", "deque"} else _items(growth)
    return (
        f"{holder}{also} keeps growing{items}: {format_bytes(growth.num_bytes)} {over}{steps}, "
        f"{format_bytes(rate)} per step{made}. {_REMEDIES.get(kind, _KEPT)}"
    )


def _items(growth: Growth) -> str:
    if growth.num_added <= 0:
        return ""
    per = "in the last pass" if growth.num_passes else "since it was first seen"
    return f" by {growth.num_added} entries {per}"


def remedy_of(kind: str) -> str:
    """Return what to do about a kind of leak."""
    return _REMEDIES.get(kind, _KEPT)
