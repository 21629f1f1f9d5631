"""The model `kvbench` for lm-evaluation-harness.

In: lm-eval's model arguments and requests. Out: its answers, each from an examined engine. Imports lm_eval
(an extra), so nothing else may import this package at the top.
"""
