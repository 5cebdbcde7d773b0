"""Benchmarks: `deadreckon bench attention | decode | filters | powers | drift | text | ranks | steps`.

`flags` has the options of each benchmark, `timing` all timing code, `page` printing and saving. Attention, filters and
powers check our results against float64 before they time them, and report no time for a wrong one.
"""
