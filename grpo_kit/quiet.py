"""Imported first: a line that bitsandbytes would write at every start on CPUs with AVX512-BF16.

It asks for a package of 4-bit CPU kernels. The kit uses 4 bits on CUDA only, so the line would send people looking for
something that changes nothing.
"""

import logging

logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in str(record.msg)
)
