"""Evidence of the precision that really ran, taken from live tensors and launches, never from the
configuration.

In: engines whose work has ended. Out: `records.Evidence`, a `Level` for each name of `records.record.LEVELS`
that is due. `examine` puts it together; each other file takes one or two levels and names them in its first
line. A level that does not hold is a mismatch whose sentence names what is wrong and in which layer. Nothing
here imports runners, gates or reports.
"""
