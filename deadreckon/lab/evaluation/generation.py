"""Text from a trained model, printed as it comes."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from transformers import TextStreamer

import deadreckon as dr
from deadreckon.lab.arguments import check_counts
from deadreckon.lab.environment import check_device, check_model
from deadreckon.lab.recipes.texts import tokenizer_beside


def run_generate(
    model: str, prompt: str, tokens: int, temperature: float, seed: int, device: str, console: Console
) -> str:
    """Continues the prompt with the model and tokenizer of a folder, and prints how fast it was."""
    check_device(device)
    check_model(Path(model))
    check_counts(tokens=tokens)
    if temperature < 0:
        raise ValueError(f"temperature: expected 0 (greedy) or more, got {temperature}")
    network = dr.DeadReckonForCausalLM.from_pretrained(model).to(device).eval()
    tokenizer = tokenizer_beside(model)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    if ids.shape[1] == 0:
        raise ValueError(f"prompt: expected at least one token, got {prompt!r}")
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    began = time.perf_counter()
    tokens_out = network.generate(
        ids, max_new_tokens=tokens, streamer=TextStreamer(tokenizer), pad_token_id=tokenizer.pad_token_id, **sampling
    )
    seconds = time.perf_counter() - began
    new = tokens_out.shape[1] - ids.shape[1]
    console.print(f"{new} tokens after {ids.shape[1]}, {new / seconds:.1f} tokens/s on {device}, seed {seed}")
    return tokenizer.decode(tokens_out[0])
