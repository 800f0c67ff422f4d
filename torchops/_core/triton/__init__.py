"""Launches of Triton kernels with little host time."""
