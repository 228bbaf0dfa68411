"""attn-cuda: attention contracts on NVIDIA GPUs, with the bits of attn_reference."""

from attn_cuda.backend import joint_attn_softmax as joint_attn_softmax

__version__ = "0.1.0"
