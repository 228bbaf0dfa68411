"""Calls of the attention backward on the device under test, beside the definition on the CPU."""

import dataclasses

import torch
from attn_reference import _attention as definition
from attn_spec.testing.asserts import assert_bytes
from attn_spec.torch import AttentionInputs, to_numpy
from attn_triton._attention_backward_launch import attention_backward

GRADIENTS = ("q", "k", "v", "sinks", "bias")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(batch, heads, kv_heads, queries, keys, head_dim, value_dim, *, dtype=torch.float32, seed=0, **options):
    """AttentionInputs of random tensors."""
    q = normal(batch, heads, queries, head_dim, seed=seed, dtype=dtype)
    k = normal(batch, kv_heads, keys, head_dim, seed=seed + 1, dtype=dtype)
    v = normal(batch, kv_heads, keys, value_dim, seed=seed + 2, dtype=dtype)
    return AttentionInputs(q=q, k=k, v=v, **{"scale": head_dim**-0.5, **options})


def cotangents(inputs, seed=7):
    """dout and dlse."""
    return normal(*inputs.q.shape[:-1], inputs.v.shape[-1], seed=seed, dtype=inputs.q.dtype), normal(*inputs.row_shape, seed=seed + 1)


def asked(inputs):
    return frozenset(name for name in GRADIENTS if getattr(inputs, name) is not None)


def moved(inputs, device):
    """``inputs`` with every tensor on ``device``."""
    tensors = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    tensors = {name: value.to(device) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(inputs, **tensors)


def run(device, inputs, dout, dlse, needs=None, state=None):
    """Gradients as numpy arrays. The row states are those of the definition, so that only the backward is under test."""
    row_max, row_sum = definition.attention_forward(inputs, inputs.q.dtype)[2:] if state is None else state
    found = attention_backward(
        moved(inputs, device),
        dout.to(device),
        None if dlse is None else dlse.to(device),
        row_max.to(device),
        row_sum.to(device),
        asked(inputs) if needs is None else needs,
    )
    assert all(gradient.is_contiguous() and gradient.dtype == getattr(inputs, name).dtype for name, gradient in found.items())
    return {name: to_numpy(gradient) for name, gradient in found.items()}


def check(device, inputs, *, dlse=True, needs=None, dout=None):
    """Compare every gradient with the definition, byte for byte; returns them."""
    upstream, cotangent = cotangents(inputs)
    upstream, cotangent = upstream if dout is None else dout, cotangent if dlse else None
    needs = asked(inputs) if needs is None else needs
    row_max, row_sum = definition.attention_forward(inputs, inputs.q.dtype)[2:]
    expected = definition.attention_backward(inputs, upstream, cotangent, row_max, row_sum, needs)
    found = run(device, inputs, upstream, cotangent, needs, (row_max, row_sum))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_bytes(found[name], to_numpy(gradient), name)
    return found
