from trl import SFTConfig, SFTTrainer

# café: a comment with an accent
config = SFTConfig(
	output_dir='out', per_device_train_batch_size=2, gradient_accumulation_steps=4,  # é
	gradient_checkpointing=False, bf16=False,
	optim='adamw_torch',
)
