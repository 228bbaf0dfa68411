"""attn-reference: every contract as a readable definition (``pytorch``), and compiled CPU kernels of the same bits (``host``).

The operators run the host kernels on CPU tensors where they are compiled, and the PyTorch definition everywhere else.
"""

import importlib

from attn_reference import nvfp4 as nvfp4
from attn_reference import pytorch as pytorch
from attn_reference._attention_fp32 import attention_fp32 as attention_fp32
from attn_reference._engine import attention as attention
from attn_reference._engine import attention_varlen as attention_varlen
from attn_reference._engine import joint_attention as joint_attention
from attn_reference._engine import joint_attn_av_gemm as joint_attn_av_gemm
from attn_reference._engine import joint_attn_qk_gemm as joint_attn_qk_gemm
from attn_reference._engine import joint_attn_softmax as joint_attn_softmax
from attn_reference.pytorch import qat_attention as qat_attention
from attn_reference.pytorch import qat_attention_varlen as qat_attention_varlen

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Imported on demand: where the host kernels are not compiled, the import says so.
    if name == "host":
        return importlib.import_module("attn_reference.host")
    raise AttributeError(f"module 'attn_reference' has no attribute {name!r}")
