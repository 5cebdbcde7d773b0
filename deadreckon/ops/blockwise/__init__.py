"""Attention in plain PyTorch: any device and dtype, memory linear in T, every transport, gate and score."""
