"""A custom training loop with accelerate: several devices, gradient accumulation, bf16, checkpoints.

accelerate launch examples/accelerated.py book.txt --out runs/book --steps 1000     # needs accelerate

Tokens are bytes. If killed, run the same command again: it resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import deadreckon as dr

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--width", type=int, default=256)
options = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16" if torch.cuda.is_available() else "no")
config = dr.DeadReckonConfig(
    encoding="path-fox", vocab_size=256, hidden_size=options.width, num_hidden_layers=4,
    num_attention_heads=max(options.width // 64, 1), qk_norm=True,
)  # fmt: skip
model = dr.DeadReckonForCausalLM(config)
ids = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
rows = ids[: len(ids) // options.length * options.length].view(-1, options.length)
optimizer = torch.optim.AdamW(dr.parameter_groups(model, 1e-3, 0.1))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=8, shuffle=True))

state = options.out / "state"
done = int((state / "step").read_text()) if (state / "step").exists() else 0
if done:
    accelerator.load_state(str(state))
    accelerator.print(f"resumes at step {done}")
while done < options.steps:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch, labels=batch, skip_logits=True).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        done += accelerator.sync_gradients
        if accelerator.sync_gradients and (done % 100 == 0 or done == options.steps):
            accelerator.print(f"step {done}: loss {loss.item():.3f}")
            accelerator.save_state(str(state))
            if accelerator.is_main_process:
                (state / "step").write_text(str(done))
        if done == options.steps:
            break
accelerator.unwrap_model(model).save_pretrained(options.out, is_main_process=accelerator.is_main_process)
