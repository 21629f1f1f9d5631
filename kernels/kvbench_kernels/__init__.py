"""Kernels of kvbench, each with its torch twin. Knows tensors only: nothing of kvbench is imported here."""
