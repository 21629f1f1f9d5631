"""From a YAML matrix to cells and tasks.

In: YAML, overrides, facts of a model. Out: cells, tasks with their keys, and for each cell which format,
backend and product run, with reasons. No torch here.
"""
