"""A hook of mkdocs: results/, notebooks and the contributors' guide are on the site too, under their own names.

Markdown in docs/ links to ../results/x.md, as it lies in the repository; on the site that is results/x.md.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> Any:
    """Adds files from outside docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in sorted((*ROOT.glob("results/*.md"), *ROOT.glob("results/*.png"), *ROOT.glob("*.md"))):
        if path.name != "README.md":
            name = path.relative_to(ROOT).as_posix()
            added = File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(added)
    sys.path.insert(0, str(ROOT / "docs"))
    from notebooks import as_markdown

    for path in sorted(ROOT.glob("docs/notebooks/*.ipynb")):
        text = as_markdown(json.loads(path.read_text()))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites links for the site."""
    folder = page.file.src_uri.rpartition("/")[0]
    if folder == "notebooks":
        return markdown.replace("](../../results/", "](../results/")
    if folder:
        return markdown
    markdown = re.sub(r"\]\(notebooks/(\w+)\.ipynb\)", r"](notebooks/\1.md)", markdown)
    return re.sub(r"\]\((?:\.\./|docs/)", "](", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Replaces Sphinx roles of docstrings, which Markdown does not know."""
    return re.sub(r":(?:class|func|meth|data):(?=<code)", "", html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Serves the theme's one external script locally; raises if a page loads anything else from other servers."""
    return _at_home(output, "../" * page.url.count("/"))


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """The same for pages that are not Markdown."""
    return _at_home(output, "")


def _at_home(output: str, root: str) -> str:
    output = output.replace("https://unpkg.com/iframe-worker/shim", f"{root}worker.js")
    if away := re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=.?https?://[^ >]*", output):
        raise ValueError(f"site: expected nothing from other servers, got {away[0]}")
    return output
