"""The histogram filter of PRISM's cursors and superpositions of positions: definition, PyTorch, C, Triton."""
