"""
LoRA finetuning of a causal language model on instruction data (jsonl with "instruction",
"input" and "output"). Only the answer counts in the loss.

python finetune_lora.py --model_config llama_tiny.json --data_path data/alpaca
"""
import argparse
import json
import math
import os
import random

import torch
from peft import LoraConfig, TaskType, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
    set_seed,
)

PROMPT = "### Task:\n{instruction}\n\n### Given:\n{input}\n\n### Answer:\n"
HERE = os.path.dirname(os.path.abspath(__file__))


def create_data(path):
    os.makedirs(path, exist_ok=True)
    rng = random.Random(0)
    verbs = ["Sort", "Reverse", "Count", "Repeat", "Shorten", "Translate", "Explain", "List"]
    nouns = ["words", "letters", "numbers", "names", "lines", "cities", "colours", "animals"]
    items = ["".join(rng.choice("bcdfglmnprst") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))) for _ in range(300)]
    for name, n in (("train.jsonl", 320), ("val.jsonl", 48)):
        with open(os.path.join(path, name), "w") as f:
            for _ in range(n):
                given = [rng.choice(items) for _ in range(rng.randint(10, 110))]
                row = {
                    "instruction": f"{rng.choice(verbs)} the {rng.choice(nouns)} below.",
                    "input": " ".join(given),
                    "output": " ".join(sorted(given)[: rng.randint(5, 100)]),
                }
                f.write(json.dumps(row) + "\n")


def train_tokenizer(path, vocab_size):
    """A byte-level BPE over the training file; kept beside it."""
    file = os.path.join(path, "tokenizer.json")
    if os.path.exists(file):
        tok = Tokenizer.from_file(file)
    else:
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<s>", "</s>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tok.train([os.path.join(path, "train.jsonl")], trainer)
        tok.save(file)
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


class InstructionDataset(Dataset):
    def __init__(self, file, tokenizer, cutoff_len):
        with open(file) as f:
            self.rows = [json.loads(line) for line in f]
        self.tokenizer = tokenizer
        self.cutoff_len = cutoff_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        prompt = self.tokenizer(PROMPT.format(**row), add_special_tokens=False)["input_ids"]
        answer = self.tokenizer(row["output"], add_special_tokens=False)["input_ids"]
        input_ids = [self.tokenizer.bos_token_id] + prompt + answer + [self.tokenizer.eos_token_id]
        labels = [-100] * (1 + len(prompt)) + input_ids[1 + len(prompt) :]
        input_ids, labels = input_ids[: self.cutoff_len], labels[: self.cutoff_len]
        return {"input_ids": input_ids, "attention_mask": [1] * len(input_ids), "labels": labels}


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    total, count = 0.0, 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        n = (batch["labels"] != -100).sum().item()
        if n == 0:
            continue
        total += model(**batch).loss.item() * n
        count += n
    model.train()
    return total / max(count, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_config", default=os.path.join(HERE, "llama_tiny.json"))
    parser.add_argument("--base_weights", default=None, help="a state dict to start from")
    parser.add_argument("--data_path", default="data/alpaca")
    parser.add_argument("--output_dir", default="out/lora")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--micro_batch_size", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--cutoff_len", type=int, default=384)
    parser.add_argument("--lora_r", type=int, default=8)
    parser.add_argument("--lora_alpha", type=int, default=16)
    parser.add_argument("--lora_dropout", type=float, default=0.05)
    parser.add_argument("--lora_target_modules", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    parser.add_argument("--no_gradient_checkpointing", action="store_true")
    parser.add_argument("--eval_every", type=int, default=3)
    args = parser.parse_args()
    set_seed(42)

    if not os.path.exists(os.path.join(args.data_path, "train.jsonl")):
        create_data(args.data_path)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if bf16 else torch.float32

    config = LlamaConfig.from_json_file(args.model_config)
    tokenizer = train_tokenizer(args.data_path, config.vocab_size)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if args.base_weights:
        model.load_state_dict(torch.load(args.base_weights, map_location="cpu"))

    if not args.no_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model = get_peft_model(
        model,
        LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=args.lora_r,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            target_modules=args.lora_target_modules,
            bias="none",
        ),
    )
    model.print_trainable_parameters()
    model.to(device)

    collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8, return_tensors="pt", padding=True)
    train_set = InstructionDataset(os.path.join(args.data_path, "train.jsonl"), tokenizer, args.cutoff_len)
    val_set = InstructionDataset(os.path.join(args.data_path, "val.jsonl"), tokenizer, args.cutoff_len)
    train_loader = DataLoader(train_set, batch_size=args.micro_batch_size, shuffle=True, collate_fn=collator)
    val_loader = DataLoader(val_set, batch_size=args.micro_batch_size, collate_fn=collator)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, args.max_steps)
    accumulate = max(1, args.batch_size // args.micro_batch_size)

    model.train()
    step, best = 0, math.inf
    bar = tqdm(total=args.max_steps)
    while step < args.max_steps:
        for i, batch in enumerate(train_loader):
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss / accumulate
            loss.backward()
            if (i + 1) % accumulate:
                continue
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            bar.update(1)
            bar.set_postfix(loss=loss.item() * accumulate, norm=float(norm), lr=scheduler.get_last_lr()[0])
            if step % args.eval_every == 0:
                val = evaluate(model, val_loader, device)
                tqdm.write(f"step {step}: val loss {val:.4f}, perplexity {math.exp(val):.1f}")
                if val < best:
                    best = val
                    model.save_pretrained(args.output_dir)
            if step >= args.max_steps:
                break
    bar.close()


if __name__ == "__main__":
    main()
