"""One thread a test process: the tests run side by side, and tiny tensors gain nothing from more."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
