"""Contracts as data: the operators they cover, what they accumulate in, and what each guarantees, with the test that holds it."""

from __future__ import annotations

from dataclasses import dataclass

from attn_spec._errors import UnknownName
from attn_spec._operators import PRODUCTION, QAT

__all__ = ["CONTRACTS", "Contract", "Guarantee", "Limits", "contract", "contract_reasons"]


@dataclass(frozen=True)
class Guarantee:
    """One promise: a change that moves no bit of the named quantities, and the test that shows it."""

    change: str
    quantities: tuple[str, ...]
    test: str


@dataclass(frozen=True)
class Limits:
    """What a contract covers of its operators, where that is not everything. Value dim = head dim."""

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    features: frozenset[str]
    others: str = "ordered-v1"

    def reasons(self, name: str, dtype: str, head_dim: int, value_dim: int, features: frozenset[str]) -> tuple[str, ...]:
        """Why contract ``name`` is refused, each with the contract that has it."""
        found = []
        if dtype not in self.dtypes:
            found.append(f"dtype {dtype} with contract {name} (it covers {', '.join(self.dtypes)}; others: {self.others})")
        if head_dim not in self.head_dims or value_dim != head_dim:
            widths, sizes = ", ".join(map(str, self.head_dims)), f"head_dim={head_dim}, value_dim={value_dim}"
            found.append(f"{sizes} with contract {name} (it covers {widths}, both the same; others: {self.others})")
        unknown = sorted(features - self.features)
        if unknown:
            known = ", ".join(sorted(self.features))
            found.append(f"{', '.join(unknown)} with contract {name} ({self.others} has them; it covers {known})")
        return tuple(found)


@dataclass(frozen=True)
class Contract:
    """A named, versioned arithmetic. Changing arithmetic makes a new contract, never a changed one."""

    name: str
    document: str
    operators: tuple[str, ...]
    reduction_order: str
    accumulator_precision: str
    split_k: bool
    tf32: bool
    tile: int
    guarantees: tuple[Guarantee, ...] = ()
    limits: Limits | None = None


_ROW = ("out", "lse", "dq")
_ALL = ("out", "lse", "dq", "dk", "dv", "dsinks", "dbias")
_HALF = ("out", "lse", "dq", "dk", "dv", "dsinks")
_SOFTMAX = ("probs", "dscores")
_SUITE = "shared_tests/src/attn_shared_tests"
_FOUR_BIT = (
    Guarantee("backend", _HALF, f"{_SUITE}/test_qat.py::test_bytes_equal_the_reference"),
    Guarantee("batch size, slot and neighbours", (*_ROW, "dk", "dv"), f"{_SUITE}/test_qat.py::test_items_stand_alone"),
    Guarantee("later tokens of a causal call", _ROW, f"{_SUITE}/test_qat.py::test_later_tokens_move_no_bit"),
    Guarantee("packed or alone", (*_ROW, "dk", "dv"), f"{_SUITE}/test_qat.py::test_packed_equals_alone"),
    Guarantee("repetition and strides", _HALF, f"{_SUITE}/test_qat.py::test_same_call_same_bits"),
)
"""What both contracts of 4-bit attention promise."""

CONTRACTS: dict[str, Contract] = {
    "ordered-v1": Contract(
        name="ordered-v1",
        document="docs/contracts/ordered-v1.md",
        operators=(
            "joint_attn_qk_gemm",
            "joint_attn_softmax",
            "joint_attn_av_gemm",
            "joint_attention",
            "attention",
            "attention_varlen",
        ),
        reduction_order="softmax: tile256_tree_128_to_1_then_left_to_right; products: one FMA chain, ascending index",
        accumulator_precision="float32",
        split_k=False,
        tf32=False,
        tile=256,
        guarantees=(
            Guarantee("backend", _ALL, f"{_SUITE}/test_cross_backend.py::test_bytes_equal_the_reference"),
            Guarantee("batch size and slot", (*_ROW, "dk", "dv"), f"{_SUITE}/test_batch_invariance.py::test_batch_size_and_slot"),
            Guarantee("neighbours' contents and lengths", (*_ROW, "dk", "dv"), f"{_SUITE}/test_batch_invariance.py::test_neighbours"),
            Guarantee("chunking of queries", _ROW, f"{_SUITE}/test_chunking.py::test_chunked_prefill"),
            Guarantee("decode or prefill", ("out", "lse"), f"{_SUITE}/test_chunking.py::test_decode_equals_prefill"),
            Guarantee("left, right or middle padding", (*_ROW, "dk", "dv"), f"{_SUITE}/test_padding.py::test_padding_moves_no_bit"),
            Guarantee("packed or padded", (*_ROW, "dk", "dv"), f"{_SUITE}/test_varlen.py::test_packed_equals_alone"),
            Guarantee("repetition and threads", _ALL, f"{_SUITE}/test_repetition.py::test_same_call_same_bits"),
        ),
    ),
    "ordered-v2": Contract(
        name="ordered-v2",
        document="docs/contracts/ordered-v2.md",
        operators=("joint_attn_softmax",),
        reduction_order="tile1024_tree_512_to_1_then_left_to_right; one exponential an element",
        accumulator_precision="float32",
        split_k=False,
        tf32=False,
        tile=1024,
        guarantees=(
            Guarantee("backend", _SOFTMAX, f"{_SUITE}/test_ordered_v2.py::test_bytes_equal_the_reference"),
            Guarantee("batch size, slot and neighbours", _SOFTMAX, f"{_SUITE}/test_ordered_v2.py::test_rows_stand_alone"),
            Guarantee("left, right or middle padding", _SOFTMAX, f"{_SUITE}/test_ordered_v2.py::test_padding_moves_no_bit"),
            Guarantee("repetition and strides", _SOFTMAX, f"{_SUITE}/test_ordered_v2.py::test_same_call_same_bits"),
        ),
    ),
    "sm90-v1": Contract(
        name="sm90-v1",
        document="docs/contracts/sm90-v1.md",
        operators=("joint_attention", "attention", "attention_varlen"),
        reduction_order="tensor-core steps of 16, ascending; key tiles of 128 (64 for D = 256) in segments of 1024, merged left to right",
        accumulator_precision="float32, truncated in each tensor-core step",
        split_k=False,
        tf32=False,
        tile=128,
        guarantees=(
            Guarantee("backend", _HALF, f"{_SUITE}/test_sm90.py::test_bytes_equal_the_reference"),
            Guarantee("batch size, slot and neighbours", (*_ROW, "dk", "dv"), f"{_SUITE}/test_sm90.py::test_items_stand_alone"),
            Guarantee("chunking of queries", _ROW, f"{_SUITE}/test_sm90.py::test_chunked_prefill"),
            Guarantee("decode or prefill", ("out", "lse"), f"{_SUITE}/test_sm90.py::test_decode_equals_prefill"),
            Guarantee("packed or alone", (*_ROW, "dk", "dv"), f"{_SUITE}/test_sm90.py::test_packed_equals_alone"),
            Guarantee("padding of the prompt", ("out", "dq", "dk", "dv"), f"{_SUITE}/test_sm90.py::test_prompt_padding_moves_no_bit"),
            Guarantee("repetition and strides", _HALF, f"{_SUITE}/test_sm90.py::test_same_call_same_bits"),
        ),
        limits=Limits(
            dtypes=("bfloat16", "float16"),
            head_dims=(64, 128, 256),
            features=frozenset(
                {
                    "causal",
                    "window",
                    "kv_lengths",
                    "q_start",
                    "k_start",
                    "seqlens_q",
                    "seqlens_k",
                    "sinks",
                    "prompt_mask",
                    "return_lse",
                    "gradient",
                }
            ),
        ),
    ),
    "nvfp4-ordered-v1": Contract(
        name="nvfp4-ordered-v1",
        document="docs/contracts/nvfp4-v1.md",
        operators=QAT,
        reduction_order="ordered-v1 over operands in NVFP4, blocks of 16; P quantized from the row's final maximum",
        accumulator_precision="float32",
        split_k=False,
        tf32=False,
        tile=256,
        guarantees=(
            *_FOUR_BIT,
            Guarantee("left or middle padding", (*_ROW, "dk", "dv"), f"{_SUITE}/test_qat.py::test_padding_moves_no_bit"),
        ),
    ),
    "nvfp4-sm90-v1": Contract(
        name="nvfp4-sm90-v1",
        document="docs/contracts/nvfp4-v1.md",
        operators=QAT,
        reduction_order="tensor-core steps of 16 over operands in NVFP4, ascending; P quantized from the row's final maximum",
        accumulator_precision="float32, truncated in each tensor-core step",
        split_k=False,
        tf32=False,
        tile=128,
        guarantees=_FOUR_BIT,
        limits=Limits(
            dtypes=("bfloat16", "float16"),
            head_dims=(64, 128),
            features=frozenset({"causal", "seqlens_q", "seqlens_k", "sinks", "return_lse", "gradient"}),
            others="nvfp4-ordered-v1",
        ),
    ),
}


def contract(name: str) -> Contract:
    """The contract called ``name``; UnknownName lists the known ones."""
    if not isinstance(name, str) or name not in CONTRACTS:
        raise UnknownName("contract", name, CONTRACTS)
    return CONTRACTS[name]


def contract_reasons(op: str, name: str, supported: tuple[str, ...]) -> tuple[str, ...]:
    """Why contract ``name`` is refused for ``op`` by a backend that has the contracts ``supported``; empty when it is not."""
    if op == PRODUCTION:
        return ()
    if name not in supported:
        return (f"contract {name} (supported: {', '.join(supported)})",)
    covered = contract(name).operators
    return () if op in covered else (f"contract {name} for {op} (it covers {', '.join(covered)})",)


def default_contract(op: str, dtype: str, head_dim: int, device: str) -> str:
    """The contract that runs when none is named. It depends on these four alone, so a trainer and a rollout cannot drift
    apart. Production attention has none."""
    del dtype, head_dim, device
    if op in QAT:
        return "nvfp4-ordered-v1"
    return "none" if op == PRODUCTION else "ordered-v1"
