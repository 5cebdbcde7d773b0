"""Output of results: tables, plots, Markdown and HTML from runs."""
