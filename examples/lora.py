"""Adapts a saved model to another text with LoRA, and merges the adapters into a model of its own.

python examples/lora.py runs/book other.txt --out runs/adapted     # needs peft
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=256)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=True)
base = AutoModelForCausalLM.from_pretrained(options.model, trust_remote_code=True)
# By default LoRA adapts q_proj and v_proj; "all-linear" includes the linear maps of the encoding for w, β and gates.
model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
model.print_trainable_parameters()

ids = torch.tensor(tokenizer(options.text.read_text())["input_ids"])
rows = ids[: len(ids) // options.length * options.length].view(-1, options.length)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(options.steps):
    batch = rows[torch.randint(len(rows), (8,))]
    loss = model(input_ids=batch, attention_mask=torch.ones_like(batch), labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {loss.item():.3f}")
model.merge_and_unload().save_pretrained(options.out)
tokenizer.save_pretrained(options.out)
