"""The public functions of flash-attn 2.8 on tilewise's kernels: any device, no compiler.

Replace `import flash_attn` by `from tilewise.integrations import flash_attn`, or import the
functions from here: names, order and defaults of the arguments, shapes and meaning are the same.
What is computed beyond flash-attn, and the few places where the answers differ, are listed in
docs/guide/integrations.md.
"""

from tilewise.integrations.flash_attn.functional import flash_attn_func, flash_attn_varlen_func
from tilewise.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from tilewise.integrations.flash_attn.packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

# The version of the interface: programs read flash_attn.__version__ to choose arguments.
__version__ = "2.8.3"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
