"""A hook of mkdocs: pages of results/ and the contributors' guide are on the site too, under their own names.

Markdown in docs/ links to ../results/x.md, as it lies in the repository; on the site that is results/x.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> Any:
    """Adds what lies beside docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in sorted((*ROOT.glob("results/*.md"), *ROOT.glob("results/*.png"), *ROOT.glob("*.md"))):
        if path.name != "README.md":
            name = path.relative_to(ROOT).as_posix()
            added = File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as they are on the site."""
    folder = page.file.src_uri.rpartition("/")[0]
    if folder:
        return markdown
    return re.sub(r"\]\((?:\.\./|docs/)", "](", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Docstrings name classes and functions by Sphinx's roles, which Markdown does not know."""
    return re.sub(r":(?:class|func|meth|data):(?=<code)", "", html)
