"""Hooks of `mkdocs`: the README is the site's first page, and links to files outside of `docs/` are text.

`SLIPSTREAM_SOURCE` may give the address of the repository's files, for links to code. `SLIPSTREAM_MERMAID` may name a
copy of `mermaid.min.js`, for a site that loads nothing from other hosts.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and Mermaid if there is a copy of it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"(\]\()docs/", r"\1", outside(readme, "docs/"))))
    if mermaid := os.environ.get("SLIPSTREAM_MERMAID"):
        files.append(File.generated(config, "mermaid.min.js", abs_src_path=mermaid))
        config["extra_javascript"].append("mermaid.min.js")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files of the repository into text, or into links to its address."""
    return re.sub(LINK, lambda match: source(match) if match[2].startswith("../") else match[0], markdown)


def outside(text: str, inside: str) -> str:
    """Give links of the README that do not lead below `inside` the form that they have in a page."""

    def page(match: re.Match[str]) -> str:
        keep = match[2].startswith((inside, "#")) or "://" in match[2]
        return match[0] if keep else f"[{match[1]}](../{match[2]})"

    return re.sub(LINK, page, text)


def source(match: re.Match[str]) -> str:
    """Return a link to a file above `docs/` as the site has it."""
    address = os.environ.get("SLIPSTREAM_SOURCE")
    return f"[{match[1]}]({address.rstrip('/')}/{match[2].removeprefix('../')})" if address else match[1]
