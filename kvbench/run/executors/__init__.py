"""Executors measure a run's tasks in fresh processes, on this machine (`local`) or a Ray cluster."""
