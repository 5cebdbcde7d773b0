"""Text from a trained model, printed as it comes."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer, TextStreamer

import deadreckon as dr
from deadreckon.lab.environment import check_device, check_model


def run_generate(
    model: str, prompt: str, tokens: int, temperature: float, seed: int, device: str, console: Console
) -> str:
    """Continues the prompt with the model and tokenizer of a folder, and prints how fast it was."""
    check_device(device)
    check_model(Path(model))
    if tokens < 1:
        raise ValueError(f"tokens: expected 1 or more, got {tokens}")
    if temperature < 0:
        raise ValueError(f"temperature: expected 0 (greedy) or more, got {temperature}")
    network = dr.DeadReckonForCausalLM.from_pretrained(model).to(device).eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model: expected a tokenizer beside the model in {model!r}, as save_pretrained writes it"
        ) from error
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
