"""The sections on ConvE: what its document claims, and a graph of a million entities."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev

from memfit.units import format_bytes, format_seconds

from .blocks import Figures, table


def claims(figures: Figures) -> Iterator[str]:
    """Set what the document claims of its memory remedies beside what they give."""
    yield "### What the document claims, and what is so"
    yield table("claim | found", "ll", _found(figures))
    yield (
        "Predicted at the document's size: 1,000,000 entities of dimension 200. Times are the "
        "roofline's. fp16 and bf16 are autocast; losses are computed in fp32, as autocast does."
    )
    yield table(
        "card | how | rows in a batch | peak | of the plain peak | of the plain time a row",
        "llrrrr",
        _on_cards(figures["card"]),
    )
    yield (
        "Predicted and measured on the CPU with 20,000 entities, where weights and optimizer "
        "states weigh more:"
    )
    yield table(
        "how | rows in a batch | predicted | measured | difference",
        "lrrrr",
        (
            (
                row["name"],
                row["batch_size"],
                format_bytes(row["predicted_peak_bytes"]),
                format_bytes(row["measured_peak_bytes"]),
                f"{row['error_fraction']:+.3%}",
            )
            for row in figures["host"]
        ),
    )


def _on_cards(rows: list[Figures]) -> Iterator[tuple[object, ...]]:
    plain = {row["device"]: row for row in reversed(rows) if row["name"] == "as it is"}
    for row in rows:
        first = plain[row["device"]]
        yield (
            row["device"],
            row["name"],
            row["batch_size"],
            format_bytes(row["predicted_peak_bytes"]),
            f"{row['predicted_peak_bytes'] / first['predicted_peak_bytes']:.2f}",
            f"{row['sample_seconds'] / first['sample_seconds']:.2f}",
        )


def _found(figures: Figures) -> Iterator[tuple[str, str]]:
    """Say in one line for each claim what was found."""
    card, loop = figures["card"], figures["loop"]
    t4 = [row for row in card if row["device"] == "t4"]
    plain, low, both, recomputed, streamed = t4[:5]

    def times(row: Figures) -> str:
        return f"{plain['predicted_peak_bytes'] / row['predicted_peak_bytes']:.2f} x less memory"

    def larger(row: Figures) -> str:
        return f"{row['predicted_peak_bytes'] / plain['predicted_peak_bytes']:.2f} times the memory"

    faster = plain["sample_seconds"] / low["sample_seconds"]
    claim = "mixed precision: 2 x less memory and 2 x as fast; twice the batch in 8 GB, not 10"
    found = (
        f"twice the batch takes {larger(low)}, as scores stay in fp32; {faster:.2f} x as fast a "
        "row on a T4, predicted"
    )
    yield claim, found
    claim = "deleting tensors and emptying the cache: 1.5 to 2 x less memory"
    found = (
        f"a loop that deletes scores, labels and loss peaks at "
        f"{format_bytes(loop['deleted_bytes'])}, one that keeps them at "
        f"{format_bytes(loop['kept_bytes'])}, measured: where the peak is they are gone already"
    )
    yield claim, found
    claim = "gradient checkpointing: 2 to 3 x less memory, 20 % slower"
    found = f"{times(recomputed)}, predicted: the encoder is a small part, and scores stay"
    yield claim, found
    yield "both, four times the batch: 6 GB, not 10", f"{larger(both)}, predicted"
    yield "16 bits change MRR by less than 0.1 %", _mrr(figures["mrr"])
    claim = "not in the document: the loss streamed over entities"
    found = f"{times(streamed)}, predicted, and exact; the larger the batch, the more"
    yield claim, found


def _mrr(rows: list[Figures]) -> str:
    """Compare MRR in 32 and 16 bits with what another seed does."""
    differences = [row["bfloat16_mrr"] - row["float32_mrr"] for row in rows]
    spread = stdev(row["float32_mrr"] for row in rows)
    return (
        f"test MRR on UMLS {mean(row['float32_mrr'] for row in rows):.4f} in fp32 and "
        f"{mean(row['bfloat16_mrr'] for row in rows):.4f} in bf16, the means of {len(rows)} seeds: "
        f"{mean(differences):+.4f}, single seeds {min(differences):+.4f} to "
        f"{max(differences):+.4f}; another seed alone changes it by {spread:.4f} (standard "
        "deviation)"
    )


def large_graph(figures: Figures) -> Iterator[str]:
    """Say what a graph of a million entities takes, planned, trained and traced."""
    graph, plan, train = figures["graph"], figures["plan"], figures["train"]
    yield (
        f"A generated graph: {graph['num_entities']:,} entities, {graph['num_relations']} "
        f"relations, {graph['num_train']:,} training triples, "
        f"{format_bytes(graph['file_bytes'])} of text. Heads, tails and relations follow Zipf's "
        "law. ConvE of dimension 32 (8 x 4), K-vs-all: each row is scored against all entities. "
        "Where a batch's answers could not be padded to the longest list, they are pairs."
    )
    yield table(
        "device | plan | budget | as it is | planned | a step | an epoch",
        "llrrrrr",
        (
            (
                device,
                f"`{' + '.join(row['strategies'])}` ({row['numerics']})",
                "the card" if row["budget_bytes"] is None else format_bytes(row["budget_bytes"]),
                format_bytes(row["plain_peak_bytes"]),
                format_bytes(row["predicted_peak_bytes"]),
                format_seconds(row["step_seconds"]),
                f"{row['epoch_seconds'] / 3600:.1f} h, {row['epoch_steps']} steps",
            )
            for device, row in plan.items()
        ),
    )
    yield (
        f"Trained: {train['num_steps']} steps of {train['batch_size']:,} rows, a hundredth of an "
        f"epoch, inside {format_bytes(train['budget_bytes'])}; killed (SIGKILL) after step "
        f"{train['killed_after_steps']}, and continued from its last checkpoint. Peak predicted "
        f"{format_bytes(train['predicted_peak_bytes'])}, measured "
        f"{format_bytes(train['measured_peak_bytes'])} ({train['error_fraction']:+.2%}). A step "
        f"took {train['median_step_seconds']:.0f} s on the CPU that other programs shared, "
        f"predicted were {plan['cpu']['step_seconds']:.0f} s. The graph itself is held beside "
        f"that: the process took {format_bytes(train['host_bytes'])}."
    )
    if figures.get("trace"):
        yield _traced(figures["trace"], figures["trace_peak"])


def _traced(trace: Figures, peak: Figures) -> str:
    """Say what a hundredth of the training triples took to be traced."""
    return (
        f"Traced: {trace['num_test']} test triples against {trace['num_train']:,} training "
        f"triples, a hundredth, which are {trace['num_train_rows']:,} rows; {trace['loss']}. "
        f"{trace['train_chunk']} rows at a time, inside {format_bytes(trace['budget_bytes'])}; "
        "killed and continued. Peak predicted "
        f"{format_bytes(trace['predicted_peak_bytes'])}, measured "
        f"{format_bytes(trace['measured_peak_bytes'])} ({trace['error_fraction']:+.2%}), of which "
        f"{format_bytes(trace['measured_peak_bytes'] - peak['measured_peak_bytes'])} are the "
        "triples themselves, made while it was watched. Made before, as data are, the same "
        f"tracing's proof and first steps take {format_bytes(peak['measured_peak_bytes'])} "
        f"({peak['error_fraction']:+.2%}). It was "
        f"predicted to take at most {format_seconds(trace['predicted_seconds'])}; after the kill "
        f"it took {format_seconds(trace['whole_process_seconds_after_kill'])}, other programs "
        f"running beside it. The proof on a few triples: {trace['proof_error']:.0e}."
    )
