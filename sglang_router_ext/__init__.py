"""sglang-router-ext: the MoE router of SGLang, in faster kernels.

Importing this package costs no torch and no CUDA: SGLang reads entry points in processes that never touch a GPU.
Start at ``route.py`` (the whole path on one page) or ``designs.py`` (the one table of designs).
"""

__version__ = "0.1.0"

TESTED_SGLANG = "0.5.23"

__all__ = ["TESTED_SGLANG", "__version__"]
