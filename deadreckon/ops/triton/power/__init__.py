"""Even powers as scores, as attention or chunk by chunk over a state of fixed size."""
