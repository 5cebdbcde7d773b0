"""The lab: train, measure and compare. It uses the library's public names alone, and nothing imports it."""
