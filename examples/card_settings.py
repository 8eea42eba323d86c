"""The NAICS memory guide's estimate of a step, and what it suggests for cards of three sizes.

These are the guide's own formula and rule, as a reference. ``memfit config`` prints them beside
settings whose effective batch is exact, and writes those into conf/.
"""

from memfit_workloads.reference_estimate import (
    ModelConfig,
    TrainingConfig,
    estimate_memory_usage,
    suggest_configurations,
)


def main() -> None:
    """Show one estimate, and suggestions with two safety margins."""
    training = TrainingConfig(
        batch_size=32, n_positives=16, n_negatives=8, accumulate_grad_batches=8
    )
    print(estimate_memory_usage(ModelConfig(), training))
    print(f"effective batch: {training.batch_size * training.accumulate_grad_batches}")

    for name, memory_gib in (("Quadro RTX 6000", 23.6), ("A100 40 GB", 40), ("A100 80 GB", 80)):
        print(f"\n{name}")
        for each in suggest_configurations(memory_gib, ModelConfig(), target_effective_batch=256):
            print(
                f"  stage {each['stage']}: {each['batch_size']} x "
                f"{each['accumulate_grad_batches']} = {each['effective_batch_size']}, "
                f"{each['n_positives']} positives, {each['n_negatives']} negatives, "
                f"{each['memory_estimate'].total_mb / 1024:.1f} GB ({each['memory_utilization']})"
            )

    careful = suggest_configurations(23.6, ModelConfig(), safety_margin=0.75)
    print(f"\nwith safety_margin=0.75: batch_size {careful[0]['batch_size']}")


if __name__ == "__main__":
    main()
