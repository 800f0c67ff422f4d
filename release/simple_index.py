"""Writes package indexes (PEP 503) of wheels that lie elsewhere, one for each local version.

Package indexes refuse local versions, so wheels are files of a release, and these pages are what pip looks them up in::

    python release/simple_index.py build/index < wheels.txt
    pip install torchops --index-url <where the pages are>/torch213.cu130/

With torch installed already, pip needs no other index, and so looks for torchops nowhere else.

A line of ``wheels.txt`` is the SHA-256 of a wheel and its address. An index holds the wheels for one torch and one
CUDA, because pip takes the highest version that it sees, and of two local versions that is not the one that fits.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

PAGE = (
    '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"></head><body>\n{}</body></html>\n'
)


def links(lines: Iterable[str]) -> dict[str, list[str]]:
    """The HTML links of each index, by its local version.

    Raises:
        ValueError: a line is not a digest and the address of a wheel of torchops with a local version.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for line in filter(None, map(str.strip, lines)):
        digest, _, address = line.partition(" ")
        digest, address = digest.removeprefix("sha256:"), address.strip()
        name = unquote(urlsplit(address).path.rpartition("/")[2])
        wheel = re.fullmatch(r"torchops-[0-9][^-+]*\+(?P<local>[a-z0-9.]+)-py3-none-[a-z0-9_.]+\.whl", name)
        if wheel is None or not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"expected a SHA-256 and the address of a wheel with a local version, got {line!r}")
        found[wheel["local"]].append(f'<a href="{html.escape(address)}#sha256={digest}">{html.escape(name)}</a><br>\n')
    return found


def write(indexes: dict[str, list[str]], output: Path) -> None:
    """Write the pages: a list of the indexes, and in each of them the list of its one project."""
    for local, wheels in indexes.items():
        project = output / local / "torchops"
        project.mkdir(parents=True, exist_ok=True)
        (project / "index.html").write_text(PAGE.format("".join(wheels)))
        (output / local / "index.html").write_text(PAGE.format('<a href="torchops/">torchops</a>\n'))
    listed = "".join(f'<a href="{local}/">{local}</a><br>\n' for local in sorted(indexes))
    output.mkdir(parents=True, exist_ok=True)
    (output / "index.html").write_text(PAGE.format(listed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write")
    write(links(sys.stdin), parser.parse_args().output)


if __name__ == "__main__":
    main()
