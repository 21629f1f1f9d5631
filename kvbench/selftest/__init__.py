"""The engine broken on purpose, one fault at a time, to see whether the ordinary gate catches each by name.

A flag that was dropped, a scale that nothing reads, a number measured outside the quantized cache: each is
injected into the live code, a tiny matrix (`matrix.yaml`, on the CPU) is run and judged as any other, and the
exit code and the sentences say whether it got past. `table.FAULTS` has them all; `kvbench selftest` runs
them.
"""
