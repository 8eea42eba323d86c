import transformers as t
args = t.Seq2SeqTrainingArguments("out", per_device_train_batch_size=8, gradient_accumulation_steps=2, fp16=True)