"""Values of metrics from records: one file a runner, which declares its metrics next to the code that derives
them.

In: the records of a run. Out: rows, and the collected tables of metrics (`collect`). A file `<runner>.py` has
`TABLES` (its metrics), `FACTS` (what must be equal in two runs) and `values(record, baseline)`; a metric is
one entry and the lines that yield its value. Imports records, stats and matrix; nothing that renders or
judges.
"""
