"""Attention and product inputs for the tests of this package, small enough for the interpreter."""

import dataclasses

import torch
from attn_spec.torch import AttentionInputs

INF = float("inf")
NAN = float("nan")


def normal(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch=1, heads=2, kv_heads=1, queries=5, keys=20, head_dim=8, value_dim=None, dtype=torch.float32, seed=0, **options):
    """Dense inputs [B, H, S, D] and [B, K, T, *] with normal values."""
    value_dim = head_dim if value_dim is None else value_dim
    return AttentionInputs(
        q=normal(batch, heads, queries, head_dim, seed=seed, dtype=dtype),
        k=normal(batch, kv_heads, keys, head_dim, seed=seed + 1, dtype=dtype),
        v=normal(batch, kv_heads, keys, value_dim, seed=seed + 2, dtype=dtype),
        **{"scale": 0.4, **options},
    )


def on(device, call):
    """The same inputs on another device."""
    tensors = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    return dataclasses.replace(call, **{name: value.to(device) for name, value in tensors.items() if isinstance(value, torch.Tensor)})


def kept(keys, *, batch=1, seed=3):
    return torch.rand(batch, keys, generator=torch.Generator().manual_seed(seed)) < 0.6


def masked_keys_of_nan(**options):
    """Keys and values that the padding mask drops are NaN."""
    mask = kept(290, batch=2)
    call = inputs(batch=2, keys=290, key_mask=mask, **options)
    for tensor in (call.k, call.v):
        tensor[~mask[:, None].expand(tensor.shape[:3])] = NAN
    return call


def poisoned_future(**options):
    """Later keys and values are infinite or NaN, which only the last rows see; a dead row and an unmasked NaN are among them."""
    call = inputs(heads=1, queries=40, keys=40, causal=True, **options)
    call.k[:, :, 30:], call.v[:, :, 20:25], call.v[:, :, 35:] = NAN, INF, NAN
    return call


def negative_infinite_bias():
    bias = normal(1, 2, 5, 20, seed=4)
    bias[..., ::3], bias[:, :, 2], bias[:, 1, 3, 4] = -INF, -INF, NAN
    return inputs(bias=bias)


def packed(**options):
    """Segments with unused rows between them, an empty one, and one whose queries see no key."""
    offsets = torch.tensor([1, 20, 20, 33, 40]), torch.tensor([0, 30, 37, 37, 300])
    return AttentionInputs(
        q=normal(44, 4, 8, seed=1),
        k=normal(310, 2, 8, seed=2),
        v=normal(310, 2, 5, seed=3),
        cu_seqlens_q=offsets[0],
        cu_seqlens_k=offsets[1],
        seqlens_q=torch.tensor([15, 0, 13, 7]),
        scale=0.4,
        causal=True,
        **options,
    )


CALLS = {
    "one pair": lambda: inputs(queries=1, keys=1, head_dim=1),
    "one head dim of many": lambda: inputs(head_dim=130, value_dim=3, queries=2, keys=3),
    "bfloat16": lambda: inputs(dtype=torch.bfloat16, keys=70, causal=True),
    "float16, two tiles, window": lambda: inputs(dtype=torch.float16, keys=300, queries=70, window_left=200, causal=True),
    "groups": lambda: inputs(batch=2, heads=6, kv_heads=2, queries=30, keys=33, head_dim=5, causal=True, sinks=normal(6, seed=9)),
    "wide values": lambda: inputs(value_dim=200, keys=9, queries=3),
    "a sink is none": lambda: inputs(sinks=torch.tensor([-INF, 0.5]), kv_lengths=torch.tensor([0])),
    "lengths and starts": lambda: inputs(
        batch=2, keys=270, kv_lengths=torch.tensor([269, 3]), k_start=torch.tensor([300, 5]), q_start=torch.tensor([400, 2]), window_right=1
    ),
    "padding mask over NaN": masked_keys_of_nan,
    "padding mask, bias by key": lambda: masked_keys_of_nan(bias=normal(1, 2, 1, 290, seed=7), k_start=torch.tensor([3, 250]), causal=True),
    "dropped queries": lambda: inputs(queries=9, keys=9, query_mask=kept(9, seed=5), key_mask=kept(9, seed=5)),
    "infinities that some rows see": poisoned_future,
    "infinities, wide": lambda: poisoned_future(value_dim=140),
    "bias of -inf and NaN": negative_infinite_bias,
    "negative scale": lambda: inputs(scale=-1.5, window_left=3),
    "zero scale": lambda: inputs(scale=0.0),
    "large scores": lambda: inputs(scale=1e38),
    "packed": packed,
    "packed with sinks": lambda: packed(sinks=normal(4, seed=5), seqlens_k=torch.tensor([30, 7, 0, 200])),
    "no keys": lambda: inputs(keys=0, sinks=normal(2, seed=5)),
    "no queries": lambda: inputs(queries=0),
    "no batch": lambda: inputs(batch=0),
}
"""Kinds of calls; each builds fresh inputs."""
