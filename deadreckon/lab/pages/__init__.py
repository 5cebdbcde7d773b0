"""Pages: tables, pictures, Markdown and HTML made of runs."""
