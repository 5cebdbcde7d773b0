"""Benchmarks: `deadreckon bench attention | decode | filters | powers | drift | text | ranks`.

`flags` has what each takes, `timing` is the one way to time, `page` the one way to print and save. Ours is checked
against float64 first: there is no figure for it while it is wrong.
"""
