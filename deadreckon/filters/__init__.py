"""The histogram filter and superpositions of PRISM's cursors: reference, PyTorch, C and Triton implementations."""
