# Fine-tuning style loop with Accelerate: the same script runs on a cpu, a gpu, several gpus or with
# mixed precision, as `accelerate config` or the arguments say.
import argparse
import json
import os
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    get_linear_schedule_with_warmup,
)

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 32
LABELS = ["entailment", "neutral", "contradiction"]


def write_examples(folder):
    """Premise and hypothesis over a toy world of who owns what."""
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(5)
    names = "anna ben cora dan eve finn gina hugo ida jon kira leo".split()
    things = "book lamp boat horse violin kettle garden ladder camera bicycle".split()
    fill = "yesterday quietly near the old market while it was raining and nobody looked around for long".split()
    for split, n in (("train", 480), ("validation", 104)):
        with open(os.path.join(folder, f"{split}.jsonl"), "w") as f:
            for _ in range(n):
                a, t = rng.choice(names), rng.choice(things)
                extra = " ".join(rng.choice(fill) for _ in range(rng.randint(0, 70)))
                label = rng.randrange(3)
                hypothesis = [f"{a} has a {t}", f"{a} likes a {rng.choice(things)}", f"{a} has no {t}"][label]
                f.write(json.dumps({"premise": f"{a} has a {t} {extra}", "hypothesis": hypothesis, "label": label}) + "\n")
    words = sorted(set(names + things + fill + "has a no likes".split()))
    with open(os.path.join(folder, "vocab.json"), "w") as f:
        json.dump({w: i for i, w in enumerate(["<s>", "<pad>", "</s>", "<unk>", *words])}, f)


def get_tokenizer(folder):
    with open(os.path.join(folder, "vocab.json")) as f:
        vocab = json.load(f)
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.post_processor = processors.RobertaProcessing(("</s>", vocab["</s>"]), ("<s>", vocab["<s>"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def get_dataloaders(accelerator, tokenizer, folder, batch_size):
    def read(split):
        with open(os.path.join(folder, f"{split}.jsonl")) as f:
            return [json.loads(line) for line in f]

    def collate_fn(examples):
        # dynamic padding; tensor cores like multiples of 8 (fp8 of 16)
        multiple = {"fp8": 16, "no": None}.get(accelerator.mixed_precision, 8)
        batch = tokenizer(
            [e["premise"] for e in examples],
            [e["hypothesis"] for e in examples],
            truncation=True,
            max_length=128,
            padding="longest",
            pad_to_multiple_of=multiple,
            return_tensors="pt",
        )
        batch["labels"] = torch.tensor([e["label"] for e in examples])
        return batch

    train = DataLoader(read("train"), shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True)
    validation = DataLoader(read("validation"), shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    return train, validation


def training_function(config, args):
    batch_size = int(config["batch_size"])
    accumulation = 1
    if batch_size > MAX_GPU_BATCH_SIZE:
        accumulation = batch_size // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_steps=accumulation
    )
    set_seed(int(config["seed"]))

    with accelerator.main_process_first():
        if not os.path.exists(os.path.join(args.data_dir, "vocab.json")):
            write_examples(args.data_dir)
    tokenizer = get_tokenizer(args.data_dir)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, tokenizer, args.data_dir, batch_size)

    model = RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            intermediate_size=4 * args.hidden,
            max_position_embeddings=160,
            type_vocab_size=1,
            num_labels=len(LABELS),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    # the model has to be on the device before the optimizer is made
    model = model.to(accelerator.device)
    optimizer = AdamW(model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=5,
        num_training_steps=(len(train_dataloader) * config["num_epochs"]) // accumulation,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    done = 0
    for epoch in range(config["num_epochs"]):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            if args.max_batches and step >= args.max_batches:
                break
            with accelerator.accumulate(model):
                output = model(**batch)
                total_loss += output.loss.detach().float()
                accelerator.backward(output.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            done += 1

        model.eval()
        predictions, references = [], []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            pred = outputs.logits.argmax(dim=-1)
            pred, ref = accelerator.gather_for_metrics((pred, batch["labels"]))
            predictions.append(pred.cpu())
            references.append(ref.cpu())
        predictions, references = torch.cat(predictions), torch.cat(references)
        accuracy = (predictions == references).float().mean().item()
        accelerator.print(f"epoch {epoch}: loss {total_loss.item() / done:.4f}, accuracy {accuracy:.3f} of {len(references)}")
        if args.checkpointing:
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple NLI training script.")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="train on the cpu even if there is a gpu")
    parser.add_argument("--data_dir", default="data/nli")
    parser.add_argument("--output_dir", default="out/nli")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max_batches", type=int, default=8, help="batches of an epoch, 0 for all")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    config = {"lr": 2e-4, "num_epochs": args.epochs, "seed": 42, "batch_size": args.batch_size}
    training_function(config, args)


if __name__ == "__main__":
    main()
