"""Published tables: read, checked for consistency, and compared with a run of kvbench.

In: a CSV table of another source (and for `reproduce` the rows of a run). Out: findings by line, or a
comparison of signs, orders and ratios with a verdict. Imports no engine, runner or torch.
"""
