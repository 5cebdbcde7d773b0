"""Attention while a sequence comes in pieces: prefill, any split, decoding token by token; the KV cache."""
