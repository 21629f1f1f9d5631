"""The model `kvbench` for lm-eval (an extra), so nothing else may import this package at the top."""
