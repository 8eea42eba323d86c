"""Sections on losses: streamed, cut, and over sets."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import format_bytes, format_fraction

from .blocks import Figures, table


def chunked_loss(figures: Figures) -> Iterator[str]:
    """Say what a streamed loss over a million candidates takes."""
    yield (
        f"One step of a one-to-many loss, dimension {figures['dimension']}, SGD, streamed "
        f"over {figures['chunk']} entities at a time. From 16 to 256 rows the measured peak "
        f"grows by {format_bytes(figures['growth_from_16_to_256_rows_bytes'])}: no score "
        "matrix is stored."
    )
    keys = (
        "score_matrix_bytes",
        "plain_predicted_peak_bytes",
        "streamed_predicted_peak_bytes",
        "streamed_measured_peak_bytes",
    )
    yield table(
        "rows | score matrix | plain, predicted | streamed, predicted | streamed, measured",
        "rrrrr",
        ((step["batch_size"], *_bytes(step, keys)) for step in figures["steps"]),
    )


def _bytes(row: Figures, keys: tuple[str, ...]) -> Iterator[str]:
    return (format_bytes(row[key]) for key in keys)


def cached_gradients(figures: Figures) -> Iterator[str]:
    """Say how exact cached gradients are, how their peak grows, and what they cost."""
    cases = figures["cases"]
    yield (
        f"A transformer encoder with dropout, {figures['layers']} layers of width "
        f"{figures['width']}, {figures['tokens']} tokens a sample, representations of "
        f"{figures['out']} numbers, AdamW; in pieces of {figures['piece']}. In-batch negatives "
        "encode queries and documents. Gradients in fp64 at the larger batch, on one layer, "
        "largest relative error over parameters: with dropout beside one pass over the whole "
        "batch that draws the same masks, and without dropout beside the plain step. Times are "
        "CPU seconds of plain and planned steps in turns, median of the rounds' ratios."
    )
    yield table(
        "loss | error with dropout | without | plain peak | peak | time over the plain step",
        "lrrrrr",
        (
            (
                case["loss"],
                f"{case['gradient_error_with_dropout']:.1e}",
                f"{case['gradient_error_without_dropout']:.1e}",
                format_bytes(case["plain_measured_peak_bytes"]),
                format_bytes(case["peaks"][-1]["measured_peak_bytes"]),
                f"{case['seconds']['median_ratio']:.2f} x",
            )
            for case in cases
        ),
    )
    yield from _growth(cases)


def _growth(cases: list[Figures]) -> Iterator[str]:
    yield (
        "Measured peaks of a whole step. Subtracted are the batch, the representations and "
        "their gradients, which are those of the whole batch, and nothing else. The loss alone "
        "is a step on representations that are there, with its matrices of all pairs; it has "
        "freed them when the first piece goes backward, so they are no part of these peaks "
        "unless they outgrow a piece."
    )
    keys = (
        "measured_peak_bytes",
        "batch_bytes",
        "representation_bytes",
        "their_gradient_bytes",
        "matrix_of_pairs_bytes",
        "loss_alone_peak_bytes",
        "beside_bytes",
    )
    yield table(
        "loss | batch | peak | batch itself | representations | their gradients "
        "| one matrix of pairs | the loss alone | peak less the first three",
        "lrrrrrrrr",
        (
            (case["loss"], row["batch_size"], *_bytes(row, keys))
            for case in cases
            for row in case["peaks"]
        ),
    )
    growths = "; ".join(
        f"{case['loss']} {case['growth_fraction']:.1%}, and {case['growth_beside_fraction']:.1%} "
        "without what is subtracted"
        for case in cases
    )
    yield f"Growth from the smaller to the larger batch: {growths}."


def naics(figures: Figures) -> Iterator[str]:
    """Say how exact the contrastive step over industry codes is, and what it takes."""
    few, many = figures["peaks"][0], figures["peaks"][-1]
    yield (
        f"Four encoders of {figures['layers']} layers of width {figures['width']} with LoRA, "
        f"{figures['tokens']} tokens a text, experts balanced over the whole batch, Lorentz "
        f"distances, explicit negatives; in pieces of {figures['piece']}, dropout on. In fp64 "
        f"at {figures['exact_batch']} anchors loss and gradients differ from those of one pass "
        f"over the whole batch by {figures['loss_error']:.1e} and "
        f"{figures['gradient_error']:.1e}, relative. From {few['batch_size']} to "
        f"{many['batch_size']} anchors the peak grows by {figures['growth_fraction']:.1%}, from "
        f"{format_bytes(few['measured_peak_bytes'])} to "
        f"{format_bytes(many['measured_peak_bytes'])}."
    )
    yield (
        "Times are CPU seconds of plain and planned steps in turns, median of the rounds' ratios; "
        "kept pieces are not run again. The larger encoders are of MiniLM's size, with random "
        "weights."
    )
    yield table(
        "encoders | anchors | plain peak | kept pieces | peak | of plain | time over plain",
        "lrrrrrr",
        (
            (
                f"{case['layers']} layers of {case['width']}, {case['tokens']} tokens",
                case["plain_batch"],
                format_bytes(case["plain_measured_peak_bytes"]),
                row["kept_pieces"],
                format_bytes(row["measured_peak_bytes"]),
                f"{row['peak_fraction']:.0%}",
                f"{row['median_ratio']:.2f} x",
            )
            for case in figures["times"]
            for row in case["planned"]
        ),
    )


def set_losses(figures: Figures) -> Iterator[str]:
    """Say how exact streaming over kernels is, and what it takes."""
    exactness, memory = figures["exactness"], figures["memory"]
    ranks = exactness["ranks"]
    yield (
        "Score matching of a mixture, streamed over its kernels. In fp64, over all chunk "
        f"sizes and batch tiles: largest relative error of loss and gradients "
        f"{exactness['largest_error']:.1e} of the direct computation; the objective differs by "
        f"{exactness['error_of_the_objective']:.1e} from an autograd Hessian. Over 1 to "
        f"{len(ranks)} ranks (gloo, uneven parts): "
        f"{max(row['largest_error'] for row in ranks):.1e}, all ranks with the same gradients: "
        f"{'yes' if all(row['is_in_step'] for row in ranks) else 'NO'}."
    )
    yield (
        f"{memory['num_dimensions']} dimensions, {memory['num_centres']} centres, batch "
        f"{memory['batch_size']}, fp32; all precision matrices together are "
        f"{format_bytes(memory['precision_bytes'])}. Peak beyond the network's weights and "
        "gradients, and time beside storing everything, in turns:"
    )
    yield from _memory(memory["rows"], figures["many"])
    peaks = (
        f"{row['num_ranks']}: {', '.join(format_bytes(each) for each in row['peak_bytes'])}"
        for row in ranks
    )
    yield (
        f"What each of 1 to {len(ranks)} ranks holds, every one storing its own kernels: "
        f"{'; '.join(peaks)}."
    )


def _memory(rows: list[Figures], many: list[Figures]) -> Iterator[str]:
    yield table(
        "| peak | seconds | time",
        "lrrr",
        (
            (
                row["name"],
                format_bytes(row["peak_bytes"]),
                f"{row['seconds']:.2f}",
                f"{row['time_over_stored']:.2f} x",
            )
            for row in rows
        ),
    )
    yield table(
        "centres | at a time | peak | milliseconds per centre",
        "rrrr",
        (
            (
                f"{row['num_centres']:,}",
                row["chunk"],
                format_bytes(row["peak_bytes"]),
                f"{1e3 * row['seconds_per_centre']:.2f}",
            )
            for row in many
        ),
    )


def wpo_sgm(figures: Figures) -> Iterator[str]:
    """Say what the document's scale takes, and how good trained mixtures are."""
    scale = figures["scale"]
    yield (
        f"The document's scale, 3072 dimensions, 1000 centres, batch 8: "
        f"{scale['num_parameters']:,} parameters, AdamW. Budget for the process "
        f"{format_bytes(scale['budget_bytes'])}; plan {' + '.join(scale['strategies'])}, "
        f"found in {scale['plan_seconds']:.0f} s. One step took "
        f"{scale['step_seconds']:.0f} s. Process: predicted "
        f"{format_bytes(scale['predicted_process_bytes'])}, measured "
        f"{format_bytes(scale['measured_process_bytes'])} "
        f"({format_fraction(scale['error_fraction'])})."
    )
    yield (
        "Eight Gaussians, 64 centres, 500 steps of batch 256. Held-out negative log-likelihood "
        f"in nats (the data's entropy is {figures['toy'][0]['entropy']}), beside the two ways that "
        "train something else:"
    )
    yield table(
        "way | seed | test NLL | squared MMD | distance ratio",
        "lrrrr",
        (
            (
                row["way"].replace("|", "\\|"),
                row["seed"],
                f"{row['test_nll']:.3f}",
                f"{row['mmd_squared']:.4f}",
                f"{row['distance_ratio']:.2f}",
            )
            for row in figures["toy"]
        ),
    )
    yield from _pictures(figures["pictures"])


def _pictures(rows: list[Figures]) -> Iterator[str]:
    yield (
        "Pictures, held-out negative log-likelihood in nats per standardised picture, "
        "beside a kernel density estimate tuned on validation data:"
    )
    keys = ("test_nll", "gaussian_test_nll", "density_estimate_test_nll")
    yield table(
        "data | mixture | one Gaussian | density estimate | squared MMD | distance ratio",
        "lrrrrr",
        (
            (
                row["data"],
                *(f"{row['metrics'][key]:.2f}" for key in keys),
                f"{row['metrics']['mmd_squared']:.4f}",
                f"{row['metrics']['distance_ratio']:.2f}",
            )
            for row in rows
        ),
    )
    yield "; ".join(f"`{row['command']}`" for row in rows) + "."
    for row in rows:
        yield f"![{row['data']}: test data, and drawn](figures/wpo_sgm_{row['data']}.png)"
