"""Carries out a matrix.

In: a matrix. Out: a run directory. Schedule, processes, canary, sequential looks, merging of shards.
"""
