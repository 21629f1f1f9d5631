"""From values to a verdict.

In: a run, its rows and a policy. Out: outcomes with reason codes, and an exit code.
"""
