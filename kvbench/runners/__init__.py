"""Runners: one file a group of metrics; declared in `kvbench.matrix.runners`."""
