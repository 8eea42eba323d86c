"""DreaMS as its document describes it, with the leak that ends it: run it under `memfit run`.

    memfit run -- python examples/dreams_as_documented.py

Batches of 2 spectra with 100 peaks, fp32, two devices where there are two, fingerprints of 4096
bits. The metrics are a torchmetrics collection that is called in every validation step: what it
returns is logged, and it is never reset, so it keeps every prediction and every target that it has
seen, 64 KiB per spectrum. `memfit run` names the holder and the line.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC
from torchmetrics.regression import CosineSimilarity

from memfit_workloads.dreams.backbone import DreamsBackbone
from memfit_workloads.dreams.ms_data import MSData
from memfit_workloads.dreams.settings import DATASETS, SMALL
from memfit_workloads.dreams.spectra import prepared

NUM_BITS, NUM_PEAKS, BATCH_SIZE = 4096, 100, 2


class FingerprintModel(LightningModule):
    """The backbone with a fingerprint head, and metrics as the document kept them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = DreamsBackbone(SMALL)
        self.head = nn.Linear(SMALL.d_model, NUM_BITS)
        # compute_groups would share states; here each metric keeps its own, as in the document.
        self.val_metrics = MetricCollection(
            {"auroc": BinaryAUROC(), "cosine": CosineSimilarity(reduction="mean")},
            compute_groups=False,
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return 1 - cosine of the predicted fingerprint."""
        del batch_idx
        spectra, bits = batch
        predicted = self.head(self.backbone.embed(spectra)).sigmoid()
        return (1 - torch.cosine_similarity(predicted, bits)).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Call the metrics, and log the values they return."""
        del batch_idx
        spectra, bits = batch
        predicted = self.head(self.backbone.embed(spectra)).sigmoid()
        self.val_metrics["auroc"].update(predicted, bits.int())  # kept, and never reset
        self.val_metrics["cosine"].update(predicted, bits)
        self.log("val_cosine", torch.cosine_similarity(predicted, bits).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam at the rate of the document's fingerprint run."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def spectra_and_bits() -> TensorDataset:
    """Return the pesticides' spectra, padded, with made-up fingerprints."""
    data = MSData(DATASETS["pesticides"])
    tokens = torch.zeros(len(data), NUM_PEAKS + 1, 2, dtype=torch.float64)
    for row, token in enumerate(tokens):
        one = data.spectrum(row)
        own = prepared(one.mzs, one.intensities, one.precursor_mz, NUM_PEAKS)
        token[: len(own)] = torch.from_numpy(own)
    torch.manual_seed(0)
    return TensorDataset(tokens, (torch.rand(len(data), NUM_BITS) < 0.5).float())


def main() -> None:
    """Train for some epochs, validating twice in each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=60)
    parser.add_argument("--num_spectra", type=int, default=76)
    args = parser.parse_args()
    data = spectra_and_bits()
    data = TensorDataset(*data[: args.num_spectra])
    has_two = torch.cuda.device_count() > 1
    trainer = Trainer(
        max_epochs=args.max_epochs,
        accelerator="gpu" if has_two else "auto",
        devices=2 if has_two else 1,
        precision="32-true",
        val_check_interval=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    trainer.fit(FingerprintModel(), loader, DataLoader(data, batch_size=BATCH_SIZE))


if __name__ == "__main__":
    main()
