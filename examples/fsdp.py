"""Trains a PaTH-FoX model with Hugging Face's Trainer, sharded by FSDP2; run again, it resumes.

torchrun --nproc-per-node 8 examples/fsdp.py --out runs/fsdp     # needs accelerate; --cpu: gloo, without a GPU

Rows are random periodic sequences, which a model that attends to earlier tokens learns in a few hundred steps.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import deadreckon as dr

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--batch", type=int, default=8)  # of a process
parser.add_argument("--cpu", action="store_true")
options = parser.parse_args()

generator = torch.Generator().manual_seed(0)
periods = torch.randint(0, 64, (1024, 16), generator=generator)
rows = periods.repeat(1, -(-options.length // 16))[:, : options.length]
data = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(0)
config = dr.DeadReckonConfig(
    encoding="path-fox", vocab_size=64, hidden_size=options.width, num_hidden_layers=options.layers,
    num_attention_heads=max(options.width // 64, 1), qk_norm=True,
)  # fmt: skip
arguments = TrainingArguments(
    output_dir=str(options.out), max_steps=options.steps, per_device_train_batch_size=options.batch, learning_rate=1e-3,
    warmup_steps=options.steps // 10, bf16=not options.cpu, use_cpu=options.cpu, logging_steps=1, report_to="none",
    save_steps=max(options.steps // 2, 1), fsdp="WORLD_SIZE" in os.environ,  # by torchrun
    fsdp_config={
        "version": 2,  # fully_shard, by layers
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["DecoderLayer"],
        "reshard_after_forward": True,
        "state_dict_type": "SHARDED_STATE_DICT",  # each process writes its shard
    },
)  # fmt: skip
trainer = Trainer(dr.DeadReckonForCausalLM(config), arguments, train_dataset=data)
last = get_last_checkpoint(str(options.out)) if options.out.exists() else None
trainer.train(resume_from_checkpoint=last)
if trainer.is_fsdp_enabled:
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
trainer.save_model()  # whole, for from_pretrained
