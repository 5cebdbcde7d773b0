"""Operations in C, for CPUs: compiled when first used, with whatever C compiler there is, and kept in a cache folder.

Nothing here is imported until used, and nothing needs it: PyTorch's own operations do the same, more slowly.
"""
