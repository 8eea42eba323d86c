"""A token tagger on sentences of many lengths, in the manner of named-entity recognizers.

Batches are bucketed by length and padded to their longest; the loss is the mean over real tokens.
"""

import logging
import math
import random
import warnings

import lightning as L
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics.classification import MulticlassAccuracy

PAD = 0
IGNORE = -100


class TransformerTagger(L.LightningModule):
    def __init__(
        self,
        vocab_size=500,
        num_tags=9,
        d_model=64,
        nhead=4,
        num_layers=3,
        max_len=256,
        dropout=0.0,
        lr=1e-3,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=PAD)
        self.position = nn.Embedding(max_len, d_model)
        layer = nn.TransformerEncoderLayer(
            d_model, nhead, 4 * d_model, dropout=dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(d_model, num_tags)
        self.criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
        self.val_acc = MulticlassAccuracy(num_tags, average="micro", ignore_index=IGNORE)

    def forward(self, input_ids, attention_mask):
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.embedding(input_ids) + self.position(positions)
        x = self.encoder(x, src_key_padding_mask=~attention_mask)
        return self.classifier(x)

    def _loss(self, batch):
        logits = self(batch["input_ids"], batch["attention_mask"])
        labels = batch["labels"]
        return self.criterion(logits.view(-1, logits.size(-1)), labels.view(-1)), logits

    def training_step(self, batch, batch_idx):
        loss, logits = self._loss(batch)
        labels = batch["labels"]
        real = labels != IGNORE
        acc = (logits.detach().argmax(-1) == labels)[real].float().mean()
        n = labels.size(0)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=n)
        self.log("train_token_acc", acc, batch_size=n)
        self.log("train_tokens", real.sum().float(), reduce_fx="sum", batch_size=n)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, logits = self._loss(batch)
        self.val_acc(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("val_loss", loss, prog_bar=True, batch_size=len(batch["labels"]))
        self.log("val_acc", self.val_acc, batch_size=len(batch["labels"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class TaggedSentences(Dataset):
    """Random words; a word's tag follows from the word and the one before it."""

    def __init__(self, n, vocab_size, num_tags, seed, min_len=8, max_len=160):
        g = torch.Generator().manual_seed(seed)
        self.sentences = []
        for _ in range(n):
            skew = torch.rand((), generator=g) ** 2
            words = torch.randint(
                1, vocab_size, (int(min_len + skew * (max_len - min_len)),), generator=g
            )
            tags = (words + words.roll(1) // 50) % num_tags
            # Later pieces of a word have no tag of their own, as with subword tokenizers.
            tags[torch.rand(len(tags), generator=g) < 0.15] = IGNORE
            tags[0] = words[0] % num_tags
            self.sentences.append((words, tags))

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, i):
        return self.sentences[i]


def collate(samples):
    words, tags = zip(*samples, strict=True)
    input_ids = pad_sequence(words, batch_first=True, padding_value=PAD)
    labels = pad_sequence(tags, batch_first=True, padding_value=IGNORE)
    return {"input_ids": input_ids, "attention_mask": input_ids != PAD, "labels": labels}


class BucketBatchSampler(Sampler):
    """Batches of sentences of like length, in an order shuffled anew every epoch."""

    def __init__(self, lengths, batch_size, seed, bucket_batches=4):
        self.lengths = lengths
        self.batch_size = batch_size
        self.bucket_size = batch_size * bucket_batches
        self.rng = random.Random(seed)

    def __len__(self):
        return math.ceil(len(self.lengths) / self.batch_size)

    def __iter__(self):
        order = list(range(len(self.lengths)))
        self.rng.shuffle(order)
        batches = []
        for start in range(0, len(order), self.bucket_size):
            bucket = sorted(order[start : start + self.bucket_size], key=self.lengths.__getitem__)
            for i in range(0, len(bucket), self.batch_size):
                batches.append(bucket[i : i + self.batch_size])
        last = batches.pop() if len(batches[-1]) < self.batch_size else None
        self.rng.shuffle(batches)
        yield from batches
        if last:
            yield last


class TaggingDataModule(L.LightningDataModule):
    def __init__(self, batch_size=48, n_train=700, n_val=96, seed=0):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        self.train_set = TaggedSentences(self.hparams.n_train, 500, 9, self.hparams.seed)
        self.val_set = TaggedSentences(self.hparams.n_val, 500, 9, self.hparams.seed + 1)

    def train_dataloader(self):
        lengths = [len(words) for words, _ in self.train_set]
        sampler = BucketBatchSampler(lengths, self.hparams.batch_size, self.hparams.seed)
        return DataLoader(self.train_set, batch_sampler=sampler, collate_fn=collate)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size, collate_fn=collate)


def build(seed, dtype=torch.float32, *, batch_size=48, dropout=0.0, **trainer_flags):
    """Make the trainer, the module and its data."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(seed, workers=True, verbose=False)
    model = TransformerTagger(dropout=dropout).to(dtype)
    datamodule = TaggingDataModule(batch_size=batch_size, seed=seed)
    flags = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**flags, **trainer_flags}), model, datamodule
