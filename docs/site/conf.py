"""The documentation as a site: README.md, the pages of docs and the API reference, with warnings as errors.

`make site` builds it into build/site. Its sources begin at the root of the repository, so links and pictures are those
that GitHub shows; nothing in the pages is written for Sphinx. docs/README.md orders them.
"""

import os
import re
import shutil
import urllib.request
from pathlib import Path

from pygments.lexer import inherit
from pygments.lexers import PtxLexer
from pygments.token import Operator
from sphinx.application import Sphinx

import torchops

ROOT = Path(__file__).resolve().parents[2]

project = "torchops"
author = copyright = "The torchops authors"
version = torchops.__version__.partition("+")[0]
release = version

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.doctest",
    "sphinx.ext.githubpages",
    "sphinxcontrib.mermaid",
]
root_doc = "README"
exclude_patterns = [".*", "build", "dist"]
include_patterns = ["*.md", "docs/*.md", "docs/site/*.rst", "benchmarks/results/**README.md"]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/objects.inv", timeout=20):
            return True
    except OSError as error:
        print(f"no links into {url}: {error}")
        return False


# Links into these are made from lists that sphinx fetches. Without a network the site is built without, and says so.
intersphinx_mapping = {
    name: (url, None)
    for name, url in {"python": "https://docs.python.org/3", "torch": "https://docs.pytorch.org/docs/stable"}.items()
    if _answers(url)
}
# A reference that leads nowhere is an error, too, unless it leads into another project, whose list may be missing.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(torch|collections|os|fx)\..*|Tensor|Module|ExportedProgram")]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Shown under the names by which they are imported.
add_module_names = False
doctest_global_setup = "import torch\nimport torchops\nfrom torch import nn"
# As on GitHub: anchors of headings, and diagrams.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
mermaid_height = "auto"
mermaid_fullscreen = False
html_theme = "furo"
html_title = f"torchops {version}"
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

# Where links lead to whatever is no page: the repository whose workflow builds the site, or else this checkout.
FILES = ROOT.as_uri()
if repository := os.environ.get("GITHUB_REPOSITORY"):
    server, commit = os.environ.get("GITHUB_SERVER_URL", "https://github.com"), os.environ.get("GITHUB_SHA", "main")
    FILES = f"{server}/{repository}/blob/{commit}"
LINK = re.compile(r"(?<!!)\[((?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]+)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def _page(app: Sphinx, source: Path, link: str) -> str:
    """The name that Sphinx has for the page to which a link leads, or nothing."""
    name = os.path.relpath((source.parent / link).resolve(), ROOT).removesuffix(".md")
    return name if link.endswith(".md") and name in app.project.docnames else ""


def _contents(app: Sphinx) -> str:
    """The sidebar: each section of docs/README.md, with the pages that it is the first to name."""
    index = ROOT / "docs" / "README.md"
    seen, contents = {root_doc}, "\n\n```{toctree}\n:hidden:\nAll pages <docs/README>\n```\n"
    for section in index.read_text().split("\n## ")[1:]:
        pages = {}
        for text, link, _ in LINK.findall(section):
            if (page := _page(app, index, link)) and page not in seen:
                pages.setdefault(page, " ".join(text.replace("`", "").split()))
        seen.update(pages)
        heading = section.partition("\n")[0]
        if heading == "Reference":
            pages["docs/site/reference"] = "API reference"
        if heading == "Elsewhere":
            pages.update(dict.fromkeys(("CONTRIBUTING", "CHANGELOG", "SUPPORT", "SECURITY"), ""))
        if pages:
            # What is no name by itself, such as "memory" after "What is guaranteed:", gives way to the page's title.
            lines = "\n".join(f"{text} <{page}>" if text[:1].isupper() else page for page, text in pages.items())
            contents += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n{lines}\n```\n"
    return contents


def _read(app: Sphinx, name: str, text: list[str]) -> None:
    source = Path(app.env.doc2path(name))
    if source.suffix != ".md":
        return

    def lead(link: re.Match[str]) -> str:
        if _page(app, source, link[2]):
            return link[0]
        address = f"{FILES}/{os.path.relpath((source.parent / link[2]).resolve(), ROOT)}{link[3] or ''}"
        return f'<a class="reference external" href="{address}">{link[1]}</a>'  # Markdown has no links to file://

    parts = FENCE.split(text[0])
    parts[::2] = [LINK.sub(lead, part) for part in parts[::2]]
    text[0] = "".join(parts) + (_contents(app) if name == root_doc else "")


def _finish(app: Sphinx, exception: Exception | None) -> None:
    """A host shows index.html first."""
    if exception is None and app.builder.format == "html":
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


class _Ptx(PtxLexer):
    tokens = {"root": [(r"@!?", Operator), inherit]}  # noqa: RUF012  # predicates, which it lacks


def setup(app: Sphinx) -> None:
    app.add_lexer("ptx", _Ptx)
    app.connect("source-read", _read)
    app.connect("build-finished", _finish)
