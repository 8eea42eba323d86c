"""The commands of ConvE's document, on a graph that ships, under the document's file names."""

from __future__ import annotations

import shutil
from pathlib import Path

import memfit_workloads.conve

from .lines import Document, Line

_GRAPH = Path(memfit_workloads.conve.__file__).parent / "datasets" / "umls"
_ORIGINAL, _COMMAND = "python train_pytorch.py", "memfit train conve"
_FILES = (
    "--train train.txt --valid valid.txt --test test.txt --entity-to-id node_dict.txt "
    "--relation-to-id rel_dict.txt --output-dir models/conve"
)
_FLAGS = (
    "",
    "--use-mixed-precision --batch-size 512",
    "--disable-memory-cleanup",
    "--use-gradient-checkpointing",
    "--use-mixed-precision --batch-size 512 --num-epochs 20 --learning-rate 0.001",
    "--use-mixed-precision --use-gradient-checkpointing --batch-size 1024 --num-epochs 20",
    "--batch-size 256",
    "--embedding-dim 128 --output-channels 16",
    "--learning-rate 0.0005",
)
_CARD = "nvidia-smi --query-gpu=name,compute_cap --format=csv"
_TRACIN = (
    "--model-path models/conve/best_model.pt --train train.txt --test test.txt "
    "--entity-to-id node_dict.txt --relation-to-id rel_dict.txt --output tracin_results.json "
    "--use-mixed-precision --batch-size 128"
)


def _prepare(folder: Path) -> None:
    """Copy the graph, and number its names as the document has them."""
    names: dict[str, list[str]] = {"node_dict.txt": [], "rel_dict.txt": []}
    for part in ("train", "valid", "test"):
        shutil.copy(_GRAPH / f"{part}.txt", folder / f"{part}.txt")
        for line in (folder / f"{part}.txt").read_text("utf-8").splitlines():
            head, relation, tail = line.split("\t")
            names["node_dict.txt"] += [head, tail]
            names["rel_dict.txt"] += [relation]
    for file, found in names.items():
        rows = (f"{name}\t{number}\n" for number, name in enumerate(dict.fromkeys(found)))
        (folder / file).write_text("".join(rows), "utf-8")


CONVE = Document(
    workload="conve",
    lines=(
        *(
            Line(
                document=f"{_ORIGINAL} {_FILES} {flags}",
                typed=f"{_COMMAND} {_FILES} {flags} --overwrite",
            )
            for flags in _FLAGS
        ),
        Line(document=f"python run_tracin.py {_TRACIN}", typed=f"memfit tracin {_TRACIN}"),
        Line(document=_CARD, typed=_CARD),
    ),
    prepare=_prepare,
    is_one_folder=True,
)
