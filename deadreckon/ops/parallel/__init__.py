"""Context parallelism: attention over a sequence whose tokens are divided among ranks."""
