"""Values of metrics from raw samples: one file a runner, each with `values(record, baseline)`."""
