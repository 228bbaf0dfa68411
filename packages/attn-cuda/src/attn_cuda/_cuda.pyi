# Raw entry points of csrc/attn_cuda.h. Pointers and streams are integers; RuntimeError carries the CUDA error or the refusal.
from collections.abc import Callable
from typing import Any, TypeAlias

FLOAT32: int
BFLOAT16: int
FLOAT16: int
ARCHITECTURES: str
FLAGS: str
COMPILER: str
FINGERPRINT: str
SOFTMAX_TILE: int
PROBE_NAMES: str
OVER_WIDTH: int
OVER_KEYS: int
OVER_QUERIES: int
SM90: bool

Sizes: TypeAlias = tuple[int, int, int]
Rows: TypeAlias = tuple[int, int, Sizes]
Mask: TypeAlias = tuple[int, int, int, int]

Tensor: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]
Pointers: TypeAlias = tuple[int, ...]
Attention: TypeAlias = tuple[int, Tensor, Tensor, Tensor, Pointers, Tensor | None, int, int, int]
Gradients: TypeAlias = tuple[Tensor | int, ...]

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
def softmax_v2_forward(
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
def softmax_v2_backward(
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
def attention_forward_workspace(device: int, problem: Attention, scale: float, /) -> int: ...

class Product:
    def __init__(self, device: int, values: tuple[int, int, Tensor, Tensor, Tensor], scale: float, /) -> None: ...
    def run(self, stream: int, left: int, right: int, out: int, /) -> None: ...

class AttentionForward:
    def __init__(self, device: int, problem: Attention, scale: float, out_dtype: int, order: tuple[int, ...], /) -> None: ...
    def run(self, stream: int, inputs: list[int], results: list[int], workspace: int, /) -> None: ...

def attention_backward_workspace(device: int, problem: Attention, scale: float, gradients: Gradients, /) -> int: ...
def attention_backward(device: int, stream: int, problem: Attention, scale: float, gradients: Gradients, workspace: int, /) -> None: ...
def sm90_forward_workspace(device: int, problem: Attention, scale: float, /) -> int: ...
def sm90_forward(
    device: int, stream: int, problem: Attention, scale: float, factor: float, out: int, lse: int, workspace: int, /
) -> None: ...
def sm90_backward_workspace(device: int, problem: Attention, scale: float, gradients: Gradients, /) -> int: ...
def sm90_backward(
    device: int, stream: int, problem: Attention, scale: float, factor: float, gradients: Gradients, workspace: int, /
) -> None: ...
def joint_places(device: int, stream: int, values: tuple[int, int, int, int, int, int, int, int], /) -> None: ...
def join_rows(device: int, stream: int, values: tuple[Tensor, Tensor, Tensor, int, int, int], /) -> None: ...
def part_rows(device: int, stream: int, values: tuple[Tensor, Tensor, Tensor, int, int, int], /) -> None: ...
def describer(
    exchange: Any, types: tuple[type, ...], dtype: type, watchers: tuple[Callable[[], object], ...], grad_enabled: Callable[[], bool], /
) -> tuple[Callable[..., Any], Callable[..., Any]]: ...
def probe(device: int, /) -> int: ...
def capability(device: int, /) -> int: ...
