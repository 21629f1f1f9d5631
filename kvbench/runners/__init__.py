"""Runners: what is measured, one file for each group of metrics; `kvbench.matrix.runners` declares them."""
