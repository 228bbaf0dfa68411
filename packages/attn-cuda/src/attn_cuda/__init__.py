"""attn-cuda: attention contracts on NVIDIA GPUs, with the bits of attn_reference."""

from attn_cuda.backend import attention as attention
from attn_cuda.backend import attention_varlen as attention_varlen
from attn_cuda.backend import joint_attention as joint_attention
from attn_cuda.backend import joint_attn_av_gemm as joint_attn_av_gemm
from attn_cuda.backend import joint_attn_qk_gemm as joint_attn_qk_gemm
from attn_cuda.backend import joint_attn_softmax as joint_attn_softmax

__version__ = "0.1.0"
