"""kvbench: proves which precision an inference engine really ran in, then judges whether it may ship.

The package root imports nothing heavy: the base layer (matrix, formats, decision, record, metrics, gate,
stats, report) works without torch, so stored runs can be planned, judged and reported on any machine.
"""

__version__ = "0.1.0"
