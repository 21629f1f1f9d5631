"""One thread a test process: the tests run side by side, and tiny tensors gain nothing from more.

Where there is no GPU, Triton kernels run in its interpreter.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported, in every test process
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
