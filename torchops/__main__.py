"""``python -m torchops``: what to paste into a bug report."""

import sys

from torchops._info import main

print(main(sys.argv[1:]))
