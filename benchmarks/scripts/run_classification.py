#!/usr/bin/env python
# coding=utf-8
"""Train a BERT for sequence classification on csv files, with the Trainer API.

The model starts from a configuration, not from a checkpoint. Without --train_file a toy data set of
sentence pairs is written to --data_dir first.
"""

import argparse
import csv
import logging
import os
import random

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

logger = logging.getLogger(__name__)

TOPICS = {
    "sport": "match goal team coach league player score season referee stadium",
    "market": "stock bank profit share price trade investor fund quarter revenue",
    "weather": "rain storm wind cloud sunny degree forecast snow flood coast",
}
FILLERS = "the a of in on at with and but after before said today when new last more over from by".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_sentence(rng, topic):
    n = rng.randint(6, 60)
    words = TOPICS[topic].split()
    return " ".join(rng.choice(words) if rng.random() < 0.35 else rng.choice(FILLERS) for _ in range(n))


def write_toy_data(data_dir):
    os.makedirs(data_dir, exist_ok=True)
    rng = random.Random(13)
    for name, size in (("train", 600), ("dev", 120)):
        path = os.path.join(data_dir, f"{name}.csv")
        if os.path.exists(path):
            continue
        with open(path, "w", newline="") as f:
            writer = csv.DictWriter(f, fieldnames=["sentence1", "sentence2", "label"])
            writer.writeheader()
            for _ in range(size):
                a, b = rng.choice(list(TOPICS)), rng.choice(list(TOPICS))
                label = "same" if a == b else "different"
                writer.writerow({"sentence1": make_sentence(rng, a), "sentence2": make_sentence(rng, b), "label": label})
    vocab_path = os.path.join(data_dir, "vocab.txt")
    if not os.path.exists(vocab_path):
        words = sorted({w for line in TOPICS.values() for w in line.split()} | set(FILLERS))
        with open(vocab_path, "w") as f:
            f.write("\n".join(SPECIAL + words))


def load_tokenizer(data_dir):
    with open(os.path.join(data_dir, "vocab.txt")) as f:
        vocab = {w.strip(): i for i, w in enumerate(f)}
    tok = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


class PairDataset(Dataset):
    def __init__(self, path, tokenizer, label2id, max_length):
        with open(path, newline="") as f:
            rows = list(csv.DictReader(f))
        self.features = tokenizer(
            [r["sentence1"] for r in rows],
            [r["sentence2"] for r in rows],
            truncation=True,
            max_length=max_length,
            return_token_type_ids=True,
        )
        self.labels = [label2id[r["label"]] for r in rows]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        item = {k: v[i] for k, v in self.features.items()}
        item["labels"] = self.labels[i]
        return item


def compute_metrics(p):
    preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    preds = np.argmax(preds, axis=1)
    tp = ((preds == 1) & (p.label_ids == 1)).sum()
    precision = tp / max((preds == 1).sum(), 1)
    recall = tp / max((p.label_ids == 1).sum(), 1)
    return {
        "accuracy": float((preds == p.label_ids).mean()),
        "f1": float(2 * precision * recall / max(precision + recall, 1e-9)),
    }


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", default="data/pairs")
    parser.add_argument("--train_file", default=None)
    parser.add_argument("--validation_file", default=None)
    parser.add_argument("--output_dir", default="out/bert")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--num_train_epochs", type=float, default=3.0)
    parser.add_argument("--max_steps", type=int, default=24)
    parser.add_argument("--eval_steps", type=int, default=8)
    parser.add_argument("--fp16", action="store_true", help="half precision (only with a gpu)")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    set_seed(args.seed)

    if args.train_file is None:
        write_toy_data(args.data_dir)
    train_file = args.train_file or os.path.join(args.data_dir, "train.csv")
    validation_file = args.validation_file or os.path.join(args.data_dir, "dev.csv")

    label2id = {"different": 0, "same": 1}
    tokenizer = load_tokenizer(args.data_dir)
    train_dataset = PairDataset(train_file, tokenizer, label2id, args.max_seq_length)
    eval_dataset = PairDataset(validation_file, tokenizer, label2id, args.max_seq_length)
    for index in random.sample(range(len(train_dataset)), 2):
        logger.info("Sample %d of the training set: %s", index, train_dataset[index])

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 64,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=512,
        num_labels=len(label2id),
        label2id=label2id,
        id2label={v: k for k, v in label2id.items()},
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForSequenceClassification(config)

    fp16 = args.fp16 and torch.cuda.is_available()
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.per_device_train_batch_size,
        per_device_eval_batch_size=args.per_device_eval_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=args.learning_rate,
        num_train_epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        warmup_steps=4,
        weight_decay=0.01,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        save_strategy="steps",
        save_steps=args.eval_steps,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=4,
        fp16=fp16,
        report_to="none",
        seed=args.seed,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if fp16 else None),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
