"""Runners: what is measured, one file for each group of metrics; `kvbench.matrix.runners` declares them.

In: a `Context` (spec, options, model and engines of the cell). Out: a `Measurement` of raw samples and facts,
from which `kvbench.metrics.<runner>` derives values. Imports engines and evidence, never gates or reports.
"""
