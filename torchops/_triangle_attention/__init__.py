"""Triangle attention: the attention among edges, and the update of a pair tensor by it.

Their operators are registered from Python, because the CUDA kernels are written in Triton.
"""
