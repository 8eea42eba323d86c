"""How long it takes, and how much memory, to predict large steps on a GPU that is not there.

Run: python benchmarks/bench_large_model.py        (a fresh process, so imports count)

An 8-billion-parameter decoder of Llama's shape, fully fine-tuned on one sequence of 4096 tokens in
bfloat16 on an H200, and BERT-base in fp32 on a T4.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

STARTED = time.perf_counter()

import torch  # noqa: E402 - the time of imports is part of what is measured
from large_llama import LENGTH, LLAMA, build_model  # noqa: E402
from results_file import save_result  # noqa: E402
from transformers import BertConfig, BertForMaskedLM  # noqa: E402

from memfit import Job, Prediction, predict  # noqa: E402

_BERT_BATCH_SIZE, _BERT_LENGTH = 16, 128


def main() -> None:
    """Predict both steps once."""
    imported = time.perf_counter()
    bert, bert_seconds = _predicted(
        lambda: BertForMaskedLM(BertConfig()),
        (_BERT_BATCH_SIZE, _BERT_LENGTH),
        "t4",
    )
    llama, llama_seconds = _predicted(build_model, (1, LENGTH), "h200")
    save_result(
        "large_model",
        {
            "num_parameters": llama.by_category["parameters"] // 2,
            "num_layers": LLAMA["num_hidden_layers"],
            "num_tokens": LENGTH,
            "device": llama.device,
            "predict_seconds": round(llama_seconds, 2),
            "import_seconds": round(imported - STARTED, 2),
            "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "predicted_peak_bytes": llama.peak_allocated_bytes,
            "predicted_process_bytes": llama.process_bytes,
            "bert_device": bert.device,
            "bert_batch": [_BERT_BATCH_SIZE, _BERT_LENGTH],
            "bert_predict_seconds": round(bert_seconds, 2),
            "bert_predicted_peak_bytes": bert.peak_allocated_bytes,
        },
    )


def _predicted(
    build: Callable[[], torch.nn.Module], shape: tuple[int, int], device: str
) -> tuple[Prediction, float]:
    """Predict a language model's step under AdamW, and give the seconds that it took."""

    def batch(num_samples: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 1000, (num_samples, shape[1]))
        return {"input_ids": ids, "labels": ids.clone()}

    job = Job(
        model=build,
        batch=batch,
        loss=lambda model, inputs: model(**inputs).loss,
        optimizer=torch.optim.AdamW,
        batch_size=shape[0],
    )
    started = time.perf_counter()
    prediction = predict(job, device=device)
    return prediction, time.perf_counter() - started


if __name__ == "__main__":
    main()
