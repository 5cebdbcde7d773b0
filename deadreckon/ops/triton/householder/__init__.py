"""Softmax attention along products of Householder steps (PaTH), gated or not."""
