"""Values of metrics from records: a file `<runner>.py` has `TABLES` (its metrics), `FACTS` (what must be
equal in two runs that are compared) and `values(record, baseline)`.

In: the records of a run. Out: rows, and the collected tables of metrics (`collect`). Imports records, stats
and matrix; nothing that renders or judges.
"""
