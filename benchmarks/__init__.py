"""Benchmarks of every operator against what PyTorch offers for the same job: `python -m benchmarks run`."""
