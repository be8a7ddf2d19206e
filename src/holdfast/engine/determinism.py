"""What makes two runs of one program give the same bits.

`settle` is called once by a process that computes, before it computes. With it, on one type of
CPU and with one version of torch, the same inputs of the same shapes give the same bits: in
the next call, in another process, after a restart.

- The number of threads is part of the shape: sums are split among them. One is the default.
- Algorithms whose result depends on timing are refused with an error instead of used.
- float32 is float32: no TF32, no bfloat16 in the middle of a product.

What it does not do: make two types of CPU, two versions of torch or two batch sizes agree; and
on CUDA the bits are not promised, though nothing here is in the way of it.
"""

import contextlib
import os

import torch

from holdfast.errors import Mistake

__all__ = ["settle"]

MAX_THREADS = 1024


def settle(threads: int = 1) -> None:
    """Compute reproducibly from now on, in this process, with this many threads."""
    if not 1 <= threads <= MAX_THREADS:
        raise Mistake(f"threads={threads}: between 1 and {MAX_THREADS}")
    # Read by cuBLAS when it starts; without it deterministic mode refuses its products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    with contextlib.suppress(RuntimeError):  # may be set only once; no operator here uses it
        torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    # Deterministic mode would fill every new buffer first, in case somebody reads it unwritten.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
