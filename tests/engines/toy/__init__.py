"""A second engine, to prove the seam: what it needs beyond this package is one line in `kvbench.engines.ENGINES`."""
