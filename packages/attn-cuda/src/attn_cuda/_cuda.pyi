# Raw entry points of csrc/attn_cuda.h. Pointers and streams are integers; RuntimeError carries the CUDA error or the refusal.
from typing import TypeAlias

FLOAT32: int
BFLOAT16: int
FLOAT16: int
ARCHITECTURES: str
FLAGS: str
COMPILER: str
FINGERPRINT: str
PROBE_NAMES: str
OVER_WIDTH: int
OVER_KEYS: int
OVER_QUERIES: int

Sizes: TypeAlias = tuple[int, int, int]
Rows: TypeAlias = tuple[int, int, Sizes]
Mask: TypeAlias = tuple[int, int, int, int]
Strides: TypeAlias = tuple[int, ...]
Array: TypeAlias = tuple[int, int, Strides]
Problem: TypeAlias = tuple[tuple[int, ...], tuple[Array, Array, Array], tuple[int, ...], Strides, bool, int, int, float]
Results: TypeAlias = tuple[int, int, int, int, int]
Gradients: TypeAlias = tuple[Array, tuple[int, ...], Strides]

def compact_keys(device: int, stream: int, kept: int, batch: int, keys: int, positions: int, counts: int, /) -> None: ...
def softmax_forward(
    device: int,
    stream: int,
    sizes: Sizes,
    keys: int,
    scores: Rows,
    mask: Mask | None,
    probs: int,
    probs_dtype: int,
    row_max: int,
    row_sum: int,
    /,
) -> None: ...
def softmax_backward(
    device: int,
    stream: int,
    sizes: Sizes,
    keys: int,
    scores: Rows,
    dprobs: Rows,
    mask: Mask | None,
    row_max: int,
    row_sum: int,
    dscores: int,
    /,
) -> None: ...
def product(
    device: int, stream: int, kind: int, sizes: tuple[int, ...], scale: float, left: Array, right: Array, out: int, out_dtype: int, /
) -> None: ...
def attention_forward_workspace(device: int, problem: Problem, /) -> int: ...
def attention_forward(device: int, stream: int, problem: Problem, results: Results, workspace: int, /) -> None: ...
def attention_backward_workspace(device: int, problem: Problem, gradients: Gradients, /) -> int: ...
def attention_backward(device: int, stream: int, problem: Problem, gradients: Gradients, workspace: int, /) -> None: ...
def probe(device: int, /) -> int: ...
def capability(device: int, /) -> int: ...
