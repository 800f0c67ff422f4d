"""The attention of edges to edges: the operator ``myops::triangle_attention``."""
