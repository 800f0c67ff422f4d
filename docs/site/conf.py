"""The API reference: `make site` builds it from the docstrings, into build/site, with warnings as errors."""

import os

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
# Links into these are made from lists that are fetched; SITE_OFFLINE=1 does without.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
}
if os.environ.get("SITE_OFFLINE"):
    intersphinx_mapping = {}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Shown under the names by which they are imported.
add_module_names = False
doctest_global_setup = "import torch\nimport torchops\nfrom torch import nn"
html_theme = "alabaster"
html_theme_options = {"description": "Fused, in-place operators for PyTorch"}
