"""Streaming attention and its KV cache: prefill, pieces of any length, decode token by token."""
