"""``python -m torchops``: what to paste into a bug report."""

import os
import sys

from torchops._core.info import main

arguments, failed = sys.argv[1:], False
if arguments == ["--check"]:
    from torchops.ops import check

    results = check.check()
    output = check.report(results)
    failed = not all(result.ok for result in results)
else:
    output = main(arguments)
try:
    print(output, flush=True)
except BrokenPipeError:
    # The reader, such as `head`, has seen enough. Python flushes again when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
sys.exit(failed)
