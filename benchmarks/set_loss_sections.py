"""The sections of docs/benchmarks.md about losses over sets and WPO-SGM."""

from __future__ import annotations

from typing import Any

from memfit.units import format_bytes, format_fraction


def set_loss_section(figures: dict[str, Any]) -> list[str]:
    """Return how exact streaming over kernels is, and what it takes."""
    exactness, memory = figures["exactness"], figures["memory"]
    ranks = exactness["ranks"]
    lines = [
        (
            "Score matching of a mixture, streamed over its kernels. In fp64, over all chunk "
            f"sizes and batch tiles: largest relative error of loss and gradients "
            f"{exactness['largest_error']:.1e} of the direct computation; the objective differs by "
            f"{exactness['error_of_the_objective']:.1e} from an autograd Hessian. Over 1 to "
            f"{len(ranks)} ranks (gloo, uneven parts): "
            f"{max(row['largest_error'] for row in ranks):.1e}, all ranks with the same gradients: "
            f"{'yes' if all(row['is_in_step'] for row in ranks) else 'NO'}."
        ),
        "",
        (
            f"{memory['num_dimensions']} dimensions, {memory['num_centres']} centres, batch "
            f"{memory['batch_size']}, fp32; all precision matrices together are "
            f"{format_bytes(memory['precision_bytes'])}. Peak beyond the network's weights and "
            "gradients, and time beside storing everything, in turns:"
        ),
        "",
    ]
    lines += _tables(memory, figures["many"])
    peaks = (
        f"{row['num_ranks']}: {', '.join(format_bytes(each) for each in row['peak_bytes'])}"
        for row in ranks
    )
    return [
        *lines,
        "",
        (
            f"What each of 1 to {len(ranks)} ranks holds, every one storing its own kernels: "
            f"{'; '.join(peaks)}."
        ),
        "",
    ]


def _tables(memory: dict[str, Any], many: list[dict[str, Any]]) -> list[str]:
    lines = ["| | peak | seconds | time |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row['name']} | {format_bytes(row['peak_bytes'])} | {row['seconds']:.2f} | "
        f"{row['time_over_stored']:.2f} x |"
        for row in memory["rows"]
    ]
    lines += [
        "",
        "| centres | at a time | peak | milliseconds per centre |",
        "|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['num_centres']:,} | {row['chunk']} | {format_bytes(row['peak_bytes'])} | "
        f"{1e3 * row['seconds_per_centre']:.2f} |"
        for row in many
    ]
    return lines


def wpo_sgm_section(figures: dict[str, Any]) -> list[str]:
    """Return what the document's scale takes, and how good trained mixtures are."""
    lines: list[str] = []
    scale = figures["scale"]
    if scale is not None:
        lines += [
            (
                f"The document's scale, 3072 dimensions, 1000 centres, batch 8: "
                f"{scale['num_parameters']:,} parameters, AdamW. Budget for the process "
                f"{format_bytes(scale['budget_bytes'])}; plan {' + '.join(scale['strategies'])}, "
                f"found in {scale['plan_seconds']:.0f} s. One step took "
                f"{scale['step_seconds']:.0f} s. Process: predicted "
                f"{format_bytes(scale['predicted_process_bytes'])}, measured "
                f"{format_bytes(scale['measured_process_bytes'])} "
                f"({format_fraction(scale['error_fraction'])})."
            ),
            "",
        ]
    if figures["toy"]:
        lines += _toy(figures["toy"])
    if figures["pictures"]:
        lines += _pictures(figures["pictures"])
    return lines


def _toy(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        (
            "Eight Gaussians, 64 centres, 500 steps of batch 256. Held-out negative log-likelihood "
            f"in nats (the data's entropy is {rows[0]['entropy']}), beside the two ways that train "
            "something else:"
        ),
        "",
        "| way | seed | test NLL | squared MMD | distance ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['way'].replace('|', chr(92) + '|')} | {row['seed']} | {row['test_nll']:.3f} | "
        f"{row['mmd_squared']:.4f} | {row['distance_ratio']:.2f} |"
        for row in rows
    ]
    return [*lines, ""]


def _pictures(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        (
            "Pictures, held-out negative log-likelihood in nats per standardised picture, "
            "beside a kernel density estimate tuned on validation data:"
        ),
        "",
        "| data | mixture | one Gaussian | density estimate | squared MMD | distance ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        metrics = row["metrics"]
        lines.append(
            f"| {row['data']} | {metrics['test_nll']:.2f} | {metrics['gaussian_test_nll']:.2f} | "
            f"{metrics['density_estimate_test_nll']:.2f} | {metrics['mmd_squared']:.4f} | "
            f"{metrics['distance_ratio']:.2f} |"
        )
    commands = [f"`{row['command']}`" for row in rows]
    lines += ["", "; ".join(commands) + ".", ""]
    for row in rows:
        lines += [f"![{row['data']}: test data, and drawn](figures/wpo_sgm_{row['data']}.png)", ""]
    return lines
