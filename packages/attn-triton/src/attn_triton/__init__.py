"""attn-triton: the attn operators as Triton kernels, with the bits of contract ordered-v1.

Importing this package starts no GPU driver. ``TRITON_INTERPRET=1`` in the environment of the first import runs the kernels on the CPU.
"""

from attn_triton.backend import BACKEND

__all__ = ["__version__", "joint_attn_softmax"]

__version__ = "0.1.0"

joint_attn_softmax = BACKEND.operators()["joint_attn_softmax"]
