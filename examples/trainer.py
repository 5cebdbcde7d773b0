"""Trains a byte-level PaTH-FoX model on a text file with Hugging Face's Trainer; run again, it resumes.

python examples/trainer.py book.txt --out runs/book --steps 1000     # needs accelerate
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import deadreckon as dr

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
options = parser.parse_args()

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")

ids = torch.tensor(tokenizer(options.text.read_text())["input_ids"])
rows = ids[: len(ids) // options.length * options.length].view(-1, options.length)
data = [{"input_ids": row, "labels": row} for row in rows]

config = dr.DeadReckonConfig(
    encoding="path-fox", vocab_size=len(tokenizer), hidden_size=options.width, num_hidden_layers=options.layers,
    num_attention_heads=max(options.width // 64, 1), qk_norm=True, eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)  # fmt: skip
arguments = TrainingArguments(
    output_dir=str(options.out), max_steps=options.steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=options.steps // 20, bf16=torch.cuda.is_available(),
    gradient_checkpointing=True, save_steps=max(options.steps // 2, 1), logging_steps=10, report_to="none",
)  # fmt: skip
trainer = Trainer(dr.DeadReckonForCausalLM(config), arguments, train_dataset=data, processing_class=tokenizer)
last = get_last_checkpoint(str(options.out)) if options.out.exists() else None
trainer.train(resume_from_checkpoint=last)
trainer.save_model()  # with the tokenizer: examples/pipeline.py reads it
