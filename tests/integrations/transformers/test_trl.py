"""TRL's trainers are classes below the Trainer, with metrics of their own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")
from datasets import Dataset
from tests.zoo.trainers import NUM_TOKENS, difference, llama, texts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from memfit.integrations.transformers import attach
from memfit.strategies import MicroBatching
from memfit.strategies.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=3),))


def tokenizer() -> Any:
    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2}
    words |= {f"w{number}": number for number in range(3, NUM_TOKENS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tuned(folder: Any, plan: Plan | None) -> Any:
    """Train on completions alone, two batches to a window."""
    rows = [
        {"prompt": _text(row["input_ids"][:2]), "completion": f" {_text(row['input_ids'][2:])}"}
        for row in texts(24, "tokens")
    ]
    arguments = SFTConfig(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        completion_only_loss=True,
        max_length=16,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=1e-3,
    )
    made = SFTTrainer(
        model=llama(),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    if plan is not None:
        attach(made, plan=plan)
    made.train()
    return made


def _text(ids: list[int]) -> str:
    return " ".join(f"w{each}" for each in ids)


def test_completions_are_trained_and_logged_as_without_a_plan(tmp_path: Any) -> None:
    plain, split = (tuned(tmp_path, plan) for plan in (None, SPLIT))

    # TRL computes the loss in fp32, so that fp64 weights differ by its rounding.
    assert 0 < difference(plain.model, split.model) < 1e-7
    assert len(plain.state.log_history) == len(split.state.log_history)
    for one, other in zip(plain.state.log_history, split.state.log_history, strict=True):
        for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
            assert other.get(name) == pytest.approx(one.get(name), abs=1e-5)
