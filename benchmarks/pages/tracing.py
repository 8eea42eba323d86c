"""The sections on influence of training triples."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev

from memfit.units import format_bytes

from .blocks import Figures, table


def tracin(figures: Figures) -> Iterator[str]:
    """Say what scans take, how fast they are, and whose scores they equal."""
    yield (
        "Peaks of `memfit tracin`'s scan: 64 test triples, 128 training triples at a time, the "
        "ten highest and lowest kept, the training loss of whole rows, ConvE of dimension 32. The "
        "proof makes the gradient of each parameter once, so that of a large table holds the "
        "peak, unless `--unproved` leaves it out."
    )
    yield table(
        "entities | training triples | table in the proof | peak | beyond the weights | predicted",
        "rrlrrr",
        (
            (
                f"{row['num_entities']:,}",
                f"{row['num_train']:,}",
                "no" if row["unproved"] else "yes",
                format_bytes(row["measured_peak_bytes"]),
                format_bytes(row["beyond_weights_bytes"]),
                f"{row['error_fraction']:+.3%}",
            )
            for row in figures["peaks"]
        ),
    )
    yield from _times(figures["time"])
    yield "In double precision, relative to the largest score:"
    yield table(
        "graph | against a loop | against captum",
        "lrr",
        (
            (
                row["dataset"],
                f"{row['loop_difference']:.0e}",
                "-" if row["captum_difference"] is None else f"{row['captum_difference']:.0e}",
            )
            for row in figures["equal"]
        ),
    )


def _times(found: Figures) -> Iterator[str]:
    """Say how fast scans are beside others."""
    yield (
        f"Scores of {found['num_train']} training triples for {found['num_test']} test triples of "
        f"UMLS, ConvE of {found['num_weights']:,} weights in fp32, one thread, in turns; median of "
        f"{found['rounds']} rounds. The proof is in the time. captum's TracInCP loops over "
        "samples; its mode that does not takes linear layers and convolutions alone, so that it "
        "is compared on these."
    )
    titles = {
        "factors": "memfit",
        "loop": "a loop of backward passes",
        "captum": "captum's TracInCP",
        "factors of two layers": "memfit, convolution and projection alone",
        "captum of two layers": "captum's mode without a loop, the same",
    }
    yield table(
        "how | s | times memfit's, of the same | largest difference",
        "lrrr",
        (
            (
                titles[name],
                f"{seconds:.2f}",
                f"{found['times_faster'][name]:.1f} x",
                f"{found['differences'][name]:.0e}",
            )
            for name, seconds in found["seconds"].items()
        ),
    )


def mislabelled(figures: Figures) -> Iterator[str]:
    """Say how well wrong triples are found, and what removing them gives."""
    rows, chosen = figures["rows"], figures["chosen_by"]
    yield (
        f"UMLS with {figures['corrupted_fraction']:.0%} of the training triples wrong: their tails "
        "are ones that the relation has elsewhere. ConvE is trained for "
        f"{figures['epochs']} epochs; checkpoints of epochs "
        f"{', '.join(map(str, figures['checkpoints']))}, chosen on the seeds "
        f"{' and '.join(map(str, figures['seeds_chosen_on']))}. Area under the ROC curve of "
        "ranking all training triples, both directions of a triple added up. The loss is that of "
        "the triple's own score, as the mean over the same checkpoints, and at the last one."
    )
    definitions = list(rows[0]["self_influence_auroc"])
    yield table(
        "seed | "
        + " | ".join(f"self-influence, {name}" for name in definitions)
        + " | loss | last loss",
        "r" * (3 + len(definitions)),
        (
            (
                row["seed"],
                *(f"{row['self_influence_auroc'][name]:.3f}" for name in definitions),
                f"{row['loss_auroc']:.3f}",
                f"{row['last_loss_auroc']:.3f}",
            )
            for row in rows
        ),
    )
    yield (
        f"A tenth is removed, by self-influence of definition `{chosen}`, by the mean or the "
        "last loss, or at random, and ConvE is trained anew. Validation MRR, filtered by the graph "
        "without errors:"
    )
    names = list(rows[0]["valid_mrr"])
    yield table(
        "removed | " + " | ".join(f"seed {row['seed']}" for row in rows) + " | mean",
        "l" + "r" * (len(rows) + 1),
        (
            (
                name,
                *(f"{row['valid_mrr'][name]:.4f}" for row in rows),
                f"{mean(row['valid_mrr'][name] for row in rows):.4f}",
            )
            for name in names
        ),
    )
    yield _verdict(rows, chosen)


def _noise(rows: list[Figures]) -> str:
    """Say how much of that another seed changes."""
    names = ("self-influence", "loss", "last loss")
    each = [[row["valid_mrr"][name] - row["valid_mrr"]["random"] for row in rows] for name in names]
    spread = max(stdev(found) for found in each)
    return (
        f"What is gained over a random tenth differs by {spread:.3f} between seeds (the largest "
        "standard deviation of the three), so that smaller differences say nothing."
    )


def _verdict(rows: list[Figures], chosen: str) -> str:
    """Say plainly whether self-influence is better than the loss."""
    own = mean(row["self_influence_auroc"][chosen] for row in rows)
    loss = mean(max(row["loss_auroc"], row["last_loss_auroc"]) for row in rows)
    after = {name: mean(row["valid_mrr"][name] for row in rows) for name in rows[0]["valid_mrr"]}

    def beside(name: str) -> str:
        return "higher" if after["self-influence"] > after[name] else "no higher"

    better = "better than" if own > loss else "no better than"
    nothing = "above" if after["self-influence"] > after["nothing"] else "not above"
    return (
        f"On the mean of {len(rows)} seeds self-influence ({own:.3f}) finds wrong triples {better} "
        f"the better of both losses ({loss:.3f}). Without the tenth with the highest "
        f"self-influence, validation MRR is {beside('random')} than without a random tenth, "
        f"{beside('loss')} than without the tenth with the highest mean loss, "
        f"{beside('last loss')} than without that with the highest last loss, and {nothing} "
        "that of training on everything. "
        f"{_noise(rows)} The definition by whole rows ranks rows, not triples: "
        "it is of no use for this."
    )
