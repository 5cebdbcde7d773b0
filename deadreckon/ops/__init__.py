"""The attention operation, its factors and implementations: reference, PyTorch, Triton, streaming, context parallel."""
