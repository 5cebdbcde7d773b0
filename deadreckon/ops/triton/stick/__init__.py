"""Stick-breaking attention."""
