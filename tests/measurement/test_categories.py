"""What is measured at the peak is called by the same categories as what is predicted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import memfit

pytestmark = pytest.mark.slow

NUM_WORDS = 200


class Pictures(nn.Module):
    """Convolutions whose kernels ask for much that no recording knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10)),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures)


class Words(nn.Module):
    """An LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 32)
        self.layers = nn.LSTM(32, 48, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(48, NUM_WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words))[0]).flatten(0, 1)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=NUM_WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    return transformers.BertForMaskedLM(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=NUM_WORDS,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def some_words(num_samples: int) -> Tensor:
    return torch.randint(0, NUM_WORDS, (num_samples, 64))


def language(model: nn.Module, words: Tensor) -> Tensor:
    return model(input_ids=words, labels=words).loss


CASES = {
    "bert": (bert, some_words, language),
    "gpt-2": (gpt2, some_words, language),
    "lstm": (Words, some_words, lambda model, words: cross_entropy(model(words), words.flatten())),
    "cnn": (
        Pictures,
        lambda num_samples: torch.randn(num_samples, 3, 16, 16),
        lambda model, pictures: model(pictures).square().mean(),
    ),
}
MOST_BYTES_OFF = 64  # numbers that torch makes tensors of


@pytest.mark.parametrize("name", CASES)
def test_each_category_is_measured_as_it_is_predicted(name):
    model, batch, loss = CASES[name]
    job = memfit.Job(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=8,
    )
    predicted, measured = memfit.predict(job).by_category, memfit.measure(job).by_category
    saved = "saved activations"
    assert predicted[saved] > 0
    assert {
        category: (num_bytes, measured.get(category, 0))
        for category, num_bytes in predicted.items()
        if abs(num_bytes - measured.get(category, 0)) > MOST_BYTES_OFF
    } == {}
