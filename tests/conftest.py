"""Where there is no GPU, Triton's kernels run in its interpreter, which it takes up only before its first import."""

import os

from megatron_bapo.parallel.platform import has_gpu

if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"
