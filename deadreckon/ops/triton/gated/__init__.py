"""Softmax attention with forget gates inside a flash kernel (FoX, ALiBi)."""
