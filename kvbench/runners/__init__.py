"""Runners: one file a group of metrics; declared in `kvbench.tasks`."""
