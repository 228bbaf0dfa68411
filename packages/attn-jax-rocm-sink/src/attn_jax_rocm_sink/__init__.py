"""attn-jax-rocm-sink: attention with softmax sinks for JAX, bit for bit under contract ``ordered-v1`` or, when named, ``sm90-v1``.

    from attn_jax_rocm_sink import attention

    out = attention(q, k, v, causal=True, sinks=sinks)

Axes: B batch, H query heads, K kv heads, S queries, T keys, D head dim of q and k, V head dim of v. Layout [B, H, S, D].
"""

# First, so that an old JAX gets its version message before a newer interface is touched.
from attn_jax_rocm_sink import _versions as _versions
from attn_jax_rocm_sink._attention import attention as attention
from attn_jax_rocm_sink._attention_types import AttnBiasType as AttnBiasType
from attn_jax_rocm_sink._attention_types import AttnMaskType as AttnMaskType
from attn_jax_rocm_sink._attention_types import AttnSoftmaxType as AttnSoftmaxType
from attn_jax_rocm_sink._attention_types import QKVLayout as QKVLayout
from attn_jax_rocm_sink._dot_product_attention import dot_product_attention as dot_product_attention
from attn_jax_rocm_sink._fused_attn import fused_attn as fused_attn
from attn_jax_rocm_sink._maxtext import MaxTextAttention as MaxTextAttention
from attn_jax_rocm_sink._sequence_descriptor import SequenceDescriptor as SequenceDescriptor

__all__ = [
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "MaxTextAttention",
    "QKVLayout",
    "SequenceDescriptor",
    "attention",
    "dot_product_attention",
    "fused_attn",
]
__version__ = "0.1.0"
