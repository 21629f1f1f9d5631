"""Where the tasks of a run are measured: in this process (`kvbench.run.execute`), in fresh ones on this machine, or on a Ray cluster."""
