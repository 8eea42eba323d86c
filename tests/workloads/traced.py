"""A tiny graph and checkpoints of a ConvE on it, for the tests of ``memfit tracin``."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from memfit_workloads.conve.model import ConvE, build_model
from memfit_workloads.conve.sizes import ConvESizes

ENTITIES, RELATIONS, SMOOTHING = 12, 3, 0.1
EPOCHS = (2, 10)
RATES = {2: 0.5, 10: 0.25}


def lines(number: int, seed: int) -> list[str]:
    """Draw distinct triples."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < number:
        head, tail = draw.sample(range(ENTITIES), 2)
        found[f"e{head}\tr{draw.randrange(RELATIONS)}\te{tail}"] = None
    return list(found)


def write_run(folder: Path, *, dtype: torch.dtype = torch.float64) -> Path:
    """Write the run folder of a training with two checkpoints."""
    sizes = ConvESizes(
        num_entities=ENTITIES,
        num_relations=RELATIONS,
        embedding_dim=12,
        embedding_height=3,
        embedding_width=4,
        output_channels=2,
    )
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    texts = {"train": lines(25, 0), "valid": lines(4, 1), "test": lines(5, 2)}
    for name, each in texts.items():
        (folder / f"{name}.txt").write_text("\n".join(each) + "\n")
    for kind, count in (("entity", ENTITIES), ("relation", RELATIONS)):
        ids = "".join(f"{kind[0]}{number}\t{number}\n" for number in range(count))
        (run / f"{kind}_to_id.txt").write_text(ids)
    config = {
        "data": {name: str(folder / f"{name}.txt") for name in texts},
        "model": sizes.to_json(),
        "training": {
            "training_target": "k-vs-all",
            "label_smoothing": SMOOTHING,
            "skip_bad_lines": False,
        },
    }
    (run / "config.json").write_text(json.dumps(config))
    for epoch in EPOCHS:
        model = build_model(sizes, epoch).to(dtype)
        torch.manual_seed(epoch)
        with torch.no_grad():
            model.entity_bias.normal_()
            for name, each in model.named_buffers():
                if name.endswith("running_mean"):
                    each.normal_(0.0, 0.2)
        write_checkpoint(run / "checkpoints" / f"checkpoint_epoch_{epoch}.pt", model, epoch)
    return run


def write_checkpoint(path: Path, model: ConvE, epoch: int) -> None:
    """Write what training writes of a model, without its optimizer."""
    content = {
        "epoch": epoch,
        "model_state_dict": model.state_dict(),
        "model_config": model.sizes.to_json(),
        "metrics": {"learning_rate": RATES[epoch]},
    }
    torch.save(content, path)
