"""The attention layer, what it remembers, and the Hugging Face model."""
