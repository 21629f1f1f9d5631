"""Evidence of the precision that really ran, taken from live tensors and launches, never from the
configuration.

In: engines whose work has ended. Out: `records.Evidence`, with a `Level` for each due name of
`records.record.LEVELS`. `examine` collects the levels. Each other file takes one or two of them, as its first
line says. A level that does not hold is a mismatch; its sentence says what is wrong and in which layer.
Nothing here imports runners, gates or reports.
"""
