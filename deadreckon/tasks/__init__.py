"""Tasks whose answers can be scored at any length. One file each."""
