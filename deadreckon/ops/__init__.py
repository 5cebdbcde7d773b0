"""The equation: `attend`, its factors, and how it is computed: by definition, in PyTorch, in Triton, in pieces."""
