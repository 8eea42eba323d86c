"""Plan, start, step: a training loop that holds its budget.

    python examples/training_loop.py

Every micro-batch, every recomputed block and the optimizer's implementation come from the plan.
The loop does not know about them.
"""

from transformer import job, make_batch

import memfit
from memfit.units import format_bytes

BUDGET = "220MiB"
NUM_STEPS = 4


def main() -> None:
    """Train for a few steps, and compare the promise with what was measured."""
    plain = memfit.predict(job)
    print(f"plain:     {format_bytes(plain.peak_allocated_bytes)}")

    plan = memfit.plan(job, budget=BUDGET)
    print(f"budget:    {BUDGET}")
    print(f"plan:      {' + '.join(plan.labels())} ({plan.numerics})")
    print(f"predicted: {format_bytes(plan.prediction.peak_allocated_bytes)}")

    run = memfit.start(job, plan)
    for _ in range(NUM_STEPS):
        result = run.step(make_batch(job.batch_size))
        print(f"step {run.num_steps}: loss {float(result.loss):.3f}, {result.step_seconds:.2f} s")
    print(f"measured:  {format_bytes(run.measured_peak_bytes)}")


if __name__ == "__main__":
    main()
