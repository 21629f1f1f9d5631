"""Two or more stored runs compared: which tasks are the same work, and what changed between them. Pure.

In: runs (`pairing.Stored`). Out: findings with outcomes and an exit code (`two_runs`), or lines over time
(`history`). How the change of a metric is estimated is declared with the metric; nothing here renders a page.
"""
