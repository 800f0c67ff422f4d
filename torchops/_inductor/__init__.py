"""The pass behind :mod:`torchops.inductor`. Imported only when the pass is switched on, since it imports Inductor.

`graph` and `expressions` read graphs of ATen operators; `linear`, `dense` and `gates` find the forward patterns, and
`gradients` their backward pass in a joint graph. `table` knows when an operator is faster, and `passes` rewrites the
graph.
"""

from .passes import COUNTER, HOOKS, REPORT, Chain, CountMatches, RewriteGates, chained

__all__ = ["COUNTER", "HOOKS", "REPORT", "Chain", "CountMatches", "RewriteGates", "chained"]
