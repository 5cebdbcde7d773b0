"""The attention layer, its state (KV cache), and the Hugging Face model."""
