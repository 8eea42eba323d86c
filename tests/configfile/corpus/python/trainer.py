"""Fine-tune a classifier."""
from transformers import Trainer, TrainingArguments

training_args = TrainingArguments(
    output_dir="results",
    num_train_epochs=3,
    per_device_train_batch_size=16,  # per GPU
    per_device_eval_batch_size=64,
    warmup_steps=500,
)
trainer = Trainer(model=None, args=training_args)
