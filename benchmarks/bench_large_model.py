"""How long it takes, and how much memory, to predict a decoder of 6.7 billion parameters.

Run: python benchmarks/bench_large_model.py        (a fresh process, so imports count)
"""

from __future__ import annotations

import resource
import time

STARTED = time.perf_counter()

import torch  # noqa: E402 - the time of imports is part of what is measured
import transformers  # noqa: E402
from results_file import save_result  # noqa: E402

from memfit import Job, predict  # noqa: E402

_CONFIG = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11_008,
    "max_position_embeddings": 4096,
    "use_cache": False,
}


def main() -> None:
    """Predict the step once."""
    config = transformers.LlamaConfig(**_CONFIG)

    def batch(num_samples: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, _CONFIG["vocab_size"], (num_samples, 2048))
        return {"input_ids": ids, "labels": ids.clone()}

    job = Job(
        model=lambda: transformers.LlamaForCausalLM(config),
        batch=batch,
        loss=lambda model, inputs: model(**inputs).loss,
        optimizer=torch.optim.AdamW,
        batch_size=1,
    )
    imported = time.perf_counter()
    prediction = predict(job, device="a100-80gb")
    done = time.perf_counter()
    save_result(
        "large_model",
        {
            "num_parameters": prediction.by_category["parameters"] // 4,
            "num_layers": _CONFIG["num_hidden_layers"],
            "predict_seconds": round(done - imported, 2),
            "whole_process_seconds": round(done - STARTED, 2),
            "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "predicted_peak_bytes": prediction.peak_allocated_bytes,
        },
    )


if __name__ == "__main__":
    main()
