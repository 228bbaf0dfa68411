"""The goals of speed: where each figure stands in the result files, what is wanted, and why it is missed where it is.

``tables.py`` makes the table of them. No figure is written down here: a rerun decides which goals are met. A reason is shown of a missed
goal alone, so a goal near its bound has one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Documents = Mapping[str, dict[str, Any]]

SOFTMAX, ATTENTION, LATENCY = "softmax-h200.json", "attention-h200.json", "latency-h200.json"
SM90, QAT = "sm90-h200.json", "qat-h200.json"
FILES = (SOFTMAX, ATTENTION, LATENCY, SM90, QAT)
AV_KERNELS = {"attn_cuda": "values_kernel", "attn_triton": "row_sums"}
"""By backend, the kernel of decode that sums P times the values."""


@dataclass(frozen=True)
class Figure:
    """``value`` of the only row of ``file`` with all of ``row``, over the largest of ``over`` if any."""

    file: str
    value: str | Callable[[Row], float | None]
    row: Row
    over: tuple[Figure, ...] = ()

    def read(self, documents: Documents) -> float:
        """Raises LookupError unless there is one such row and it has the value."""
        found = [row for row in documents[self.file]["results"] if all(row.get(name) == value for name, value in self.row.items())]
        if len(found) != 1:
            raise LookupError(f"{self.file} has {len(found)} rows of {self.row}")
        value = self.value(found[0]) if callable(self.value) else found[0].get(self.value)
        if value is None:
            raise LookupError(f"{self.file}: the row of {self.row} lacks {self.value}")
        return float(value) / max((other.read(documents) for other in self.over), default=1.0)


@dataclass(frozen=True)
class Reason:
    """Why a goal is missed, and what to try next."""

    why: str
    then: str


@dataclass(frozen=True)
class Goal:
    """``parts`` by label must each be at least ``wanted``, or with ``at_most`` no more than it."""

    what: str
    wanted: float
    unit: str
    parts: Mapping[str, Figure]
    reason: Reason | None = None
    at_most: bool = False
    digits: int = 3

    def reached(self, documents: Documents) -> dict[str, float]:
        return {label: figure.read(documents) for label, figure in self.parts.items()}

    def meets(self, value: float) -> bool:
        return value <= self.wanted if self.at_most else value >= self.wanted


@dataclass(frozen=True)
class Verdict:
    goal: Goal
    reached: Mapping[str, float]
    missed: tuple[str, ...] = field(default=())


def verdicts(documents: Documents) -> list[Verdict]:
    """Every goal with its figures. Raises LookupError where a row is not found."""
    found = []
    for goal in GOALS:
        reached = goal.reached(documents)
        found.append(Verdict(goal, reached, tuple(label for label, value in reached.items() if not goal.meets(value))))
    return found


def av_chain(row: Row) -> float | None:
    """Time of the kernel that sums P times the values over the latency of its chain, or None without the kernel or the bound."""
    name = AV_KERNELS.get(row["contender"])
    times = [time for kernel, time in row.get("kernels_us", {}).items() if name is not None and kernel.split("<")[0] == name]
    return sum(times) / row["bound_ms"] / 1e3 if times and row.get("bound_ms") else None


def times_as_fast(file: str, contender: str, beside: str, **row: Any) -> Figure:
    """How many times as fast ``contender`` is as ``beside``."""
    return Figure(file, "median_ms", {**row, "contender": beside}, (Figure(file, "median_ms", {**row, "contender": contender}),))


LONG_ROWS = Reason(
    "Two exponentials an element, of separately rounded operations, bind it by arithmetic: it issues in 84 % of the cycles at "
    "6544 keys and in 89 % at 7401, device memory is busy 48 and 52 % of the time. At 6544 nine warps share 26 tiles, and 63 % of"
    " the warps are there (73 % at 4608).",
    "Rows copied whole by the copy engine where they are long: 0.72 and 0.78 as a variant (softmax-variants-h200.json).",
)
HALVES_BACKWARD = Reason(
    "Against a copy it falls from 0.63 at 4608 keys to 0.53 and 0.49, torch only from 0.46 to 0.47 at 6544, whose rows begin on "
    "16 bytes, and then to 0.31. At 6544 nine warps share 26 tiles and wait for the slowest (barrier 2.6 cycles an instruction): "
    "it issues in 80 % of the cycles, at 4608 in 88 %.",
    "Warps that begin the next row instead of waiting for the others.",
)
V2_HALVES = Reason(
    "Halves have half the bytes to hide the arithmetic behind: 0.71 to 0.75 of the issue slots are used, for about 29 "
    "instructions an element and lane, and the goal would need 24, of which 13.5 are the exponential as the contract states it.",
    "Fewer instructions around it: conversions in pairs, merges of tiles and the half tile at a row's end.",
)
V2_BACKWARD = Reason(
    "At 106 to 109 registers a thread 21 to 24 % of the warps are there; halves have half the bytes to hide the arithmetic "
    "behind, and they issue in 52 to 61 % of the cycles, waiting for the loads of their row (long scoreboard 1.2 to 2.2 cycles an"
    " instruction). Rows of 7401 keys are read one element a load.",
    "The next row of halves copied while one is at work: 0.82, 0.79 and 0.64 as a variant (softmax-variants-h200.json), where "
    "24 rows take 13.6 us instead of 7.7.",
)
TRITON_FORWARD = Reason(
    "Rows in registers, a warp a tile or two, take 114 to 162 registers of a thread, and 18 to 24 % of the warps are there. Rows "
    "of 7401 keys, which do not begin on 16 bytes, are read one element a load; halves have half the bytes to hide the arithmetic"
    " behind and issue in 60 to 72 % of the cycles.",
    "Sums of the eight elements that a lane of halves reads at once, without five shuffles for each of them.",
)
TRITON_BACKWARD = Reason(
    "P and dP take 168 to 202 registers of a thread, which leave 12 to 18 % of the warps. At 7401 keys, read one element a load, "
    "they wait for their row (long scoreboard 1.8 cycles an instruction); halves have half the bytes to hide the arithmetic "
    "behind and issue in 48 to 73 % of the cycles.",
    "Rows that do not begin on 16 bytes read in vectors from the piece before them.",
)
TRITON_V1_BACKWARD = Reason(
    "It is bound by arithmetic, issued in 92 % of the cycles: P is computed in both passes over a row, where attn_cuda keeps it in shared "
    "memory, for 1.8 times the instructions.",
    "Rows in registers as under `ordered-v2`.",
)
FEW_ROWS = Reason(
    "The call is bound by its launch and the time of one row: the kernel takes 6.0 us (ordered-v1) and 5.3 (ordered-v2) beside torch's "
    "5.3, at 2 to 6 % of the issue slots.",
    "Fewer threads a row where rows are few.",
)
TRITON_FEW_ROWS = Reason(
    "Under `ordered-v1` 24 programs of one warp go through their rows tile by tile, each lane 144 elements one after another: 31 "
    "to 35 us of the kernel, beside 4.5 to 5.3 under `ordered-v2`, which has a warp a tile.",
    "A warp a tile under `ordered-v1` too.",
)
CUDA_PRODUCTS = Reason(
    "The product of q and k issues in 67 % of the cycles and that of P and v, of the same code but longer chains, in 72 %: over 128 "
    "columns both operands are turned as they are stored to shared memory, eight stores of a word where the other has two of 16 bytes, "
    "and warps wait 1.8 cycles an instruction for shared memory. attn_triton copies q and k turned first and reaches 0.77, the copies "
    "included.",
    "Copies of q and k with the columns as rows.",
)
TRITON_PRODUCTS = Reason(
    "The products that read P or dS as they lie along the sum keep 180 registers a thread, one block of eight warps a multiprocessor, "
    "and issue in 55 % of the cycles; those whose operands were copied turned have two blocks and issue in 73 to 77 %.",
    "Turn blocks of P and dS on their way through shared memory.",
)
D64 = Reason(
    "At D = 64 exponentials, masks and staging weigh twice what they do at D = 128: Nsight Compute counts 339 instructions for the 192 "
    "FMAs of dq and 403 for the 256 of dk and dv, issued in 55 % and 61 % of the cycles; under causality tiles on the diagonal are "
    "partly masked besides.",
    "16 rows a warp, for fewer shared loads an FMA.",
)
D128_FORWARD = Reason(
    "Nsight Compute: it issues in 65 % of its cycles, 393 instructions a pair and lane of which 256 are the FMAs of the chains; of "
    "5.7 cycles between two instructions of a warp 1.8 are lost to another warp that issues, 0.8 to register ports and 0.8 to shared "
    "memory.",
    "16 rows a warp, for fewer shared loads an FMA.",
)
D128_BACKWARD = Reason(
    "dq and dk and dv issue in 59 % and 60 % of the cycles, and 62 % and 69 % of what they issue are FMAs of the chains; between two "
    "instructions of a warp 1.7 cycles are lost to another warp that issues, 1.0 to register ports and 0.6 to 0.9 to shared memory. "
    "float32 has four to seven times the bank conflicts where its rows are turned; the joint layer's 1728 blocks of rows are 6.5 turns "
    "of the 264 that run at a time.",
    "16 rows a warp, for fewer shared loads an FMA; another pitch for turned float32 rows.",
)
SHORT = Reason(
    "A window of 128 keys meets one or two tiles of 256, all partly masked, and the beginning and end of a block weigh as much: a "
    "quarter of what the kernels issue are FMAs of pairs that count. Of the packed segments the longest has 1403 of 4096 rows: the "
    "block of keys with most rows has 1.5 times the mean work of the 264 blocks that run at a time, so dk and dv issue in 39 % of the "
    "cycles.",
    "Several blocks of rows at a time over the tiles of a window; the columns of dk and dv of a long block shared out over several blocks.",
)
TRITON_SHORT = Reason(
    "A line of the workspace has room for all keys of the call, which no segment has, so that the rows take five turns forward and nine "
    "backward, whose kernels are short; segments do not begin on 16 bytes, so operands are copied four bytes at a time, at 217 to 232 "
    "registers, and the pairs' products issue in 41 % of the cycles, against 52 % of whole layers, dk and dv in 22 %.",
    "Lines as long as what their rows see, and copies of the operands that begin on 16 bytes.",
)
AV_CHAINS = Reason(
    "Issue slots are its limit, of which 68 % are used: for four FMAs a key a warp also issues two conversions, a load of values "
    "and half a load of P, and each part of a multiprocessor also runs one of the four warps that load. With fewer keys the "
    "beginning and the end weigh more.",
    "Fewer instructions of the loaders, or the copy engine in their place; steps of 256 keys.",
)
TRITON_AV_CHAINS = Reason(
    "One warp a block with one query and four with more issue in 3 to 37 % of the cycles: a thread has four outputs, whose FMAs of a "
    "key fill the latency of the one before, so the loads of shared memory between them (short scoreboard 0.3 to 0.9 cycles an "
    "instruction) are in the way of the chain.",
    "Two outputs a thread, and the next keys read ahead through registers.",
)
EAGER = Reason(
    "It is time of the host, which differs between the hosts that were used: the launch, and mostly torch's allocation of results and "
    "workspace. On a quiet one attention took 13.6 us and the product 10.0 (eager-calls-h200.json).",
    "Results and workspace from one allocation.",
)
FOUR_BIT = Reason(
    "The forward goes over the keys twice and the backward once more for delta; many short kernels wait for the host where it is busy.",
    "Delta of the quantized P, which saves a pass, as another contract; a training step in a CUDA graph.",
)
SM90_FORWARD = Reason(
    "A tile takes 2924 cycles of a warpgroup, of which the tensor cores need 1024 for its own products: the additions and multiplications "
    "of one warpgroup's softmax keep the tensor cores from their operands, which the other one's products then wait for. Registers (168 a "
    "thread at launch, 232 for an owner) and shared memory (227 KiB) are used up.",
    "The end of a block while the next one's first scores are computed, and additions and multiplications spread evenly among the "
    "exponentials.",
)
SM90_DECODE = Reason(
    "Device memory is busy 79 % of the time of attn_cuda's kernel of segments, whose warps wait for it (long scoreboard), and the merge"
    " takes another 5 us; four other ways of sharing the segments out were measured and not faster. In attn_triton, one kernel without "
    "a merge, it is busy 86 % of the time.",
    "Merge in the kernel of segments without uneven blocks, the last block of a row merging it.",
)


def _softmax() -> Iterator[Goal]:
    def rows(value: str, contender: str, dtype: str, direction: str, keys: tuple[int, ...], over: str | None = None) -> dict[str, Figure]:
        found = {}
        for one in keys:
            row = {"case": f"110592x{one}", "dtype": dtype, "direction": direction}
            figure = Figure(SOFTMAX, value, {**row, "contender": contender})
            found[str(one)] = figure if over is None else times_as_fast(SOFTMAX, contender, over, **row)
        return found

    lengths = (4608, 6544, 7401)
    v1, v2 = "attn_cuda ordered-v1", "attn_cuda ordered-v2"
    for way in ("forward", "backward"):
        yield Goal(f"softmax, {v1}, float32 {way}, keys", 0.75, "of a copy", rows("of_copy", v1, "float32", way, lengths), LONG_ROWS)
    for way in ("forward", "backward"):
        reason = HALVES_BACKWARD if way == "backward" else None
        for keys, wanted in (((4608,), 1.2), ((6544, 7401), 1.4)):
            parts = rows("median_ms", v1, "bfloat16", way, keys, "torch.softmax")
            yield Goal(f"softmax, {v1}, bfloat16 {way}, keys", wanted, "of torch's rate", parts, reason)
    for contender in (v2, "attn_triton ordered-v2"):
        for dtype in ("float32", "bfloat16"):
            for way in ("forward", "backward"):
                of_triton = TRITON_FORWARD if way == "forward" else TRITON_BACKWARD
                of_cuda = V2_HALVES if way == "forward" else V2_BACKWARD
                reason = of_cuda if contender == v2 else of_triton
                yield Goal(
                    f"softmax, {contender}, {dtype} {way}, keys", 0.95, "of a copy", rows("of_copy", contender, dtype, way, lengths), reason
                )
    for backend, reason in (("attn_cuda", FEW_ROWS), ("attn_triton", TRITON_FEW_ROWS)):
        for version in ("ordered-v1", "ordered-v2"):
            parts = {}
            for way, dtype in ((way, dtype) for way in ("forward", "backward") for dtype in ("float32", "bfloat16")):
                row = {"case": "24x4608", "dtype": dtype, "direction": way}
                parts[f"{dtype} {way}"] = times_as_fast(SOFTMAX, f"{backend} {version}", "torch.softmax", **row)
            yield Goal(f"softmax of 24 rows, {backend} {version}", 1.0, "of torch's rate", parts, reason)
    for version in ("ordered-v1", "ordered-v2"):
        for way in ("forward", "backward"):
            reason = TRITON_FORWARD if way == "forward" else TRITON_V1_BACKWARD if version == "ordered-v1" else TRITON_BACKWARD
            for dtype in ("float32", "bfloat16"):
                parts = rows("median_ms", f"attn_triton {version}", dtype, way, lengths, f"attn_cuda {version}")
                yield Goal(f"softmax, attn_triton {version}, {dtype} {way}, keys", 0.6, "of attn_cuda's rate", parts, reason)


def _ordered() -> Iterator[Goal]:
    def rows(contender: str, direction: str, cases: tuple[str, ...]) -> dict[str, Figure]:
        return {case: Figure(ATTENTION, "of_fp32_gemm", {"case": case, "contender": contender, "direction": direction}) for case in cases}

    whole, half = ("d128", "d128-fp32", "d128-causal", "qwen-image", "qwen3-8b"), ("d64", "d64-causal")
    short, unit = ("gpt-oss-window", "varlen"), "of a float32 product"
    yield Goal("attention, `ordered-v1`, attn_cuda, D = 128 forward", 0.50, unit, rows("attn_cuda", "forward", whole), D128_FORWARD)
    yield Goal("attention, `ordered-v1`, attn_cuda, D = 64 forward", 0.42, unit, rows("attn_cuda", "forward", half), D64)
    yield Goal("attention, `ordered-v1`, attn_cuda, D = 128 backward", 0.35, unit, rows("attn_cuda", "backward", whole), D128_BACKWARD)
    yield Goal("attention, `ordered-v1`, attn_cuda, D = 64 backward", 0.35, unit, rows("attn_cuda", "backward", half), D64)
    wanted = {"gpt-oss-window": ("D = 64", 0.42), "varlen": ("D = 128", 0.50)}
    for case, (width, forward) in wanted.items():
        for way, bound in (("forward", forward), ("backward", 0.35)):
            yield Goal(f"attention, `ordered-v1`, attn_cuda, {width} {way}", bound, unit, rows("attn_cuda", way, (case,)), SHORT)
    for way in ("forward", "backward"):
        parts = {
            case: times_as_fast(ATTENTION, "attn_triton", "attn_cuda", case=case, direction=way) for case in (*whole, *half, *short, "d256")
        }
        yield Goal(f"attention, `ordered-v1`, attn_triton {way}", 0.6, "of attn_cuda's rate", parts, TRITON_SHORT)
    for contender, reason in (("attn_cuda", CUDA_PRODUCTS), ("attn_triton", TRITON_PRODUCTS)):
        for product in ("joint_attn_qk_gemm", "joint_attn_av_gemm"):
            parts = {way: rows(contender, way, (product,))[product] for way in ("forward", "backward")}
            yield Goal(f"`{product}`, `ordered-v1`, {contender}, float32", 0.70, unit, parts, reason)


def _latency() -> Iterator[Goal]:
    for contender, reason in (("attn_cuda", AV_CHAINS), ("attn_triton", TRITON_AV_CHAINS)):
        for queries in (1, 4, 16):
            parts = {
                str(keys): Figure(LATENCY, av_chain, {"case": f"decode-{queries}x{keys}", "contender": contender, "direction": "forward"})
                for keys in (8192, 16384, 32768)
            }
            what = f"P times the values in a decode step, `ordered-v1`, {contender}, queries {queries}, keys"
            yield Goal(what, 3.0, "times the latency of its chain", parts, reason, at_most=True, digits=2)
    operators = ("joint_attn_softmax", "joint_attn_qk_gemm", "attention")
    eager = {
        name: Figure(LATENCY, "host_us", {"case": f"overhead {name}", "contender": "attn_cuda", "direction": "eager"}) for name in operators
    }
    yield Goal("an eager call, `ordered-v1`, attn_cuda", 15.0, "us", eager, EAGER, at_most=True, digits=1)


def _tensor_cores() -> Iterator[Goal]:
    def rate(case: str, contender: str, direction: str, beside: tuple[str, ...]) -> Figure:
        row = {"case": case, "direction": direction}
        peers = tuple(Figure(SM90, "tflops", {**row, "contender": name}) for name in beside)
        return Figure(SM90, "tflops", {**row, "contender": contender}, peers)

    cases, best = ("d128", "d128-causal", "d128-32/8-causal"), ("fa3", "fa4 deterministic", "torch cudnn")
    parts = {case: rate(case, "attn_cuda", "forward", best) for case in cases}
    unit = "of the best of FlashAttention 3 and 4 and cuDNN"
    yield Goal("attention, `sm90-v1`, attn_cuda, D = 128 forward", 0.90, unit, parts, SM90_FORWARD)
    for chosen, wanted in ((cases[:1], 0.70), (cases[1:], 0.75)):
        parts = {case: rate(case, "attn_cuda", "backward", ("fa4 deterministic",)) for case in chosen}
        yield Goal("attention, `sm90-v1`, attn_cuda, D = 128 backward", wanted, "of deterministic FlashAttention 4", parts)
    parts = {case: rate(case, "attn_triton", "forward", ("torch cudnn",)) for case in cases}
    yield Goal("attention, `sm90-v1`, attn_triton, D = 128 forward", 0.60, "of cuDNN", parts)
    backends = ("attn_cuda", "attn_triton")
    copy = (
        Figure(SOFTMAX, "terabytes_per_second", {"case": "110592x4608", "dtype": "float32", "direction": "forward", "contender": "copy"}),
    )
    step = {"case": "decode-b32-4k", "direction": "forward"}
    parts = {name: Figure(SM90, "terabytes_per_second", {**step, "contender": name}, copy) for name in backends}
    yield Goal("a decode step of 32 x 4096 keys, `sm90-v1`", 0.92, "of a copy", parts, SM90_DECODE)
    step = {"case": "decode-b1-32k", "direction": "forward"}
    parts = {name: Figure(SM90, lambda row: row["median_ms"] * 1e3, {**step, "contender": name}) for name in backends}
    yield Goal("a decode step of 1 x 32768 keys, `sm90-v1`, the merge included", 55.0, "us", parts, SM90_DECODE, at_most=True, digits=1)


def _four_bit() -> Iterator[Goal]:
    for peer, wanted in (("unquantized", 0.5), ("32x32 tiles", 1.5)):
        parts = {case: times_as_fast(QAT, "training", peer, case=case, direction="step") for case in ("12x8192", "12x16384", "12x32768")}
        yield Goal("a training step in 4 bits, `nvfp4-sm90-v1`, attn_triton", wanted, f"of the rate of {peer}", parts, FOUR_BIT)


GOALS = (*_softmax(), *_ordered(), *_latency(), *_tensor_cores(), *_four_bit())
