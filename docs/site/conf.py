"""The API reference: `make site` builds it from the docstrings, into build/site, with warnings as errors."""

import urllib.request

import torchops

project = "torchops"
author = "The torchops authors"
version = torchops.__version__.partition("+")[0]
release = version

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.doctest",
]


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
html_theme = "alabaster"
html_theme_options = {"description": "Fused, in-place operators for PyTorch"}
