"""Every kernel of attn_cuda once on small shapes, forward and backward, for compute-sanitizer.

compute-sanitizer --tool racecheck --error-exitcode 9 python packages/attn-cuda/tests/every_kernel.py
"""

from __future__ import annotations

import attn_cuda
import torch
from torch import Tensor


def backward(results: Tensor | tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    outputs = [results] if isinstance(results, Tensor) else list(results)
    torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs])


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def run(dtype: torch.dtype) -> None:
    """Softmax with and without padding, both products, attention dense, masked, biased, packed, joint and in decode."""
    for keys in (70, 300, 1300):
        scores = leaf(2, 3, 5, keys, dtype=dtype)
        backward(attn_cuda.joint_attn_softmax(scores), [scores])
        mask = torch.rand(2, keys, device="cuda") < 0.7
        backward(attn_cuda.joint_attn_softmax(scores, key_padding_mask=mask), [scores])
    for width in (40, 128, 200):
        q, k, v = leaf(2, 4, 70, width, dtype=dtype), leaf(2, 2, 300, width, dtype=dtype), leaf(2, 2, 300, width, dtype=dtype)
        scores = attn_cuda.joint_attn_qk_gemm(q, k)
        backward(scores, [q, k])
        probs = torch.softmax(scores.detach(), -1).requires_grad_()
        backward(attn_cuda.joint_attn_av_gemm(probs, v), [probs, v])
        sinks, bias = leaf(4), leaf(1, 4, 70, 1)
        mask = torch.rand(2, 300, device="cuda") < 0.7
        backward(attn_cuda.attention(q, k, v, sinks=sinks, return_lse=True), [q, k, v, sinks])
        options = {"causal": False, "key_padding_mask": mask, "bias": bias, "window": (90, 20)}
        backward(attn_cuda.attention(q, k, v, **options), [q, k, v, bias])
        joint = [leaf(2, 4, length, width, dtype=dtype) for length in (20, 20, 20, 50, 50, 50)]
        backward(attn_cuda.joint_attention(*joint, prompt_mask=torch.arange(20, device="cuda").expand(2, 20) < 9), joint)
        packed = [leaf(140, heads, width, dtype=dtype) for heads in (4, 2, 2)]
        offsets = torch.tensor([0, 33, 33, 140], device="cuda")
        backward(attn_cuda.attention_varlen(*packed, offsets, offsets), packed)
        step, cache = leaf(1, 4, 1, width, dtype=dtype), [leaf(1, 2, 1500, width, dtype=dtype) for _ in range(2)]
        backward(attn_cuda.attention(step, *cache), [step, *cache])
    torch.cuda.synchronize()


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        run(dtype)
    print("every kernel ran")
