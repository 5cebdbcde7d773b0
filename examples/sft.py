"""Fine-tunes a saved model on prompts and completions with TRL's SFT trainer; the loss is on completions only.

python examples/sft.py runs/book pairs.jsonl --out runs/answers     # needs trl and datasets

A line of the file is {"prompt": "…", "completion": "…"}. The model is a folder with a tokenizer, as examples/trainer.py
makes it. If killed, run the same command again: it resumes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("pairs", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=1024)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(options.model, trust_remote_code=True)
pairs = Dataset.from_list([json.loads(line) for line in options.pairs.read_text().splitlines()])
arguments = SFTConfig(
    output_dir=str(options.out), max_steps=options.steps, max_length=options.length, completion_only_loss=True,
    per_device_train_batch_size=8, learning_rate=2e-4, warmup_steps=options.steps // 20, logging_steps=10,
    save_steps=max(options.steps // 2, 1), bf16=torch.cuda.is_available(), gradient_checkpointing=True,
    report_to="none",
)  # fmt: skip
trainer = SFTTrainer(model, arguments, train_dataset=pairs, processing_class=tokenizer)
last = get_last_checkpoint(str(options.out)) if options.out.exists() else None
result = trainer.train(resume_from_checkpoint=last)
print(f"{result.global_step} steps, loss {result.training_loss:.3f}")
trainer.save_model()
