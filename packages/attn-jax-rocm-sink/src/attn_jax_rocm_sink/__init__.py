"""attn-jax-rocm-sink: attention with softmax sinks for JAX, bit for bit under contract ``ordered-v1``.

    from attn_jax_rocm_sink import attention

    out = attention(q, k, v, causal=True, sinks=sinks)

Axes: B batch, H query heads, K kv heads, S queries, T keys, D head dim of q and k, V head dim of v. Layout [B, H, S, D].
"""

# First, so that an old JAX gets its version message before a newer interface is touched.
from attn_jax_rocm_sink import _versions as _versions
from attn_jax_rocm_sink._attention import attention as attention

__all__ = ["attention"]
__version__ = "0.1.0"
