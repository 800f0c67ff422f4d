"""The pass behind :mod:`torchops.inductor`. Imported when the pass is switched on, since it imports Inductor.

`graph` and `expressions` read graphs of ATen operators, `linear`, `dense` and `gates` find the forms, `gradients` their
backward pass in a joint graph, `table` says where an operator is the faster one, and `passes` does the work.
"""

from .passes import COUNTER, HOOKS, REPORT, Chain, CountMatches, Place, RewriteGates, chained

__all__ = ["COUNTER", "HOOKS", "REPORT", "Chain", "CountMatches", "Place", "RewriteGates", "chained"]
