"""The lab: command line, training, evaluation and benchmarks.

It uses only the library's public names, and the library never imports it.
"""
