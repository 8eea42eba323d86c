"""What ``memfit config`` predicts is the training that ``memfit train naics`` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit_workloads.naics.card_job import job_for
from memfit_workloads.naics.config import DEFAULT

SMALL = """
model:
  base_model_name: random
  encoder: {layers: 1, width: 16, heads: 2}
data_loader: {tokenization: {max_length: 8}}
"""


@pytest.mark.filterwarnings("ignore")
def test_a_stage_has_the_batch_and_the_negatives_that_are_asked_for(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(SMALL)

    trainer, module, data = job_for(config_path=config, batch_size=6, n_negatives=3)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))

    assert trainer.precision == "bf16-mixed"  # what the default says, on this machine
    assert "16-mixed" in DEFAULT.read_text()
    assert trainer.accumulate_grad_batches == 1
    assert module.sizes.encoder.base == "random"
    assert batch["negatives"].shape == (6, 3)
