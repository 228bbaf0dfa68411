"""The joint softmax with tiles of 64, 128, 256 and 512 keys: speed, and accuracy against float64. Contract ordered-v1 has 256.

Builds the C interface of attn-cuda's softmax once a tile (CMake option ATTN_CUDA_SOFTMAX_TILE) and calls it directly: the Python package
refuses a build whose tile is not the contract's. Error is the largest over the elements, in units of the last place of the float64 result
rounded to float32; "sum" is the largest relative error of a row's sum of exponentials.

    python benchmarks/tile_sweep.py --output tile-sweep.json [--rounds 20] [--tiles 64,128,256,512] [--build build/tile_sweep]

With --built, the libraries of an earlier run are taken from the folder of the builds as they are.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import measuring
import torch
from measuring import Call, Report, Row, demand_same_bytes, durations, flush_buffer, interleaved
from torch import Tensor

PACKAGE = Path(__file__).resolve().parents[1] / "packages" / "attn-cuda"
TILES = (64, 128, 256, 512)
CASES = ((110592, 4608), (110592, 7401))
ACCURACY = {"normal": 1.0, "wide": 8.0, "flat": 0.01}
"""Standard deviations of the scores of the accuracy rows."""
ACCURACY_ROWS, ACCURACY_KEYS = 4096, (4608, 32768)


class Shape(ctypes.Structure):
    """attn_cuda_shape."""

    _fields_ = (("sizes", ctypes.c_int64 * 3), ("keys", ctypes.c_int64))


class Rows(ctypes.Structure):
    """attn_cuda_rows."""

    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("strides", ctypes.c_int64 * 3))


def build(tile: int, folder: Path, built: bool) -> Path:
    """The shared library of the softmax for one tile. Raises RuntimeError with CMake's text when it does not build."""
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}{'a' if major == 9 else ''}-real"
    target = folder / str(tile)
    library = target / "libattn_cuda_softmax.so"
    if built:
        return library
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "ATTN_CUDA": "ON",
        "ATTN_CUDA_ARCHITECTURES": architecture,
        "ATTN_CUDA_SOFTMAX_TILE": str(tile),
    }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    for command in (
        ["cmake", "-G", "Ninja", "-S", str(PACKAGE), "-B", str(target), *defined],
        ["cmake", "--build", str(target), "--target", "attn_cuda_softmax"],
    ):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"tile {tile} does not build: {(done.stdout + done.stderr).strip()}")
    return library


@dataclass(frozen=True)
class Softmax:
    """The C interface of one build, on contiguous scores [rows, keys]."""

    loaded: ctypes.CDLL

    @property
    def tile(self) -> int:
        return int(self.loaded.attn_cuda_softmax_tile())

    @property
    def fingerprint(self) -> str:
        self.loaded.attn_cuda_fingerprint.restype = ctypes.c_char_p
        return str(self.loaded.attn_cuda_fingerprint().decode())

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities in the dtype of the scores, row max and row sum."""
        probs, (row_max, row_sum) = torch.empty_like(scores), (scores.new_empty(scores.shape[0], dtype=torch.float32) for _ in range(2))
        shape, rows = described(scores)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (row_max, row_sum)]
        arguments = (ctypes.byref(shape), ctypes.byref(rows), None, ctypes.c_void_p(probs.data_ptr()), rows.dtype, *pointers)
        self._demand(self.loaded.attn_cuda_softmax_forward(*place(scores), *arguments), "forward")
        return probs, row_max, row_sum

    def backward(self, scores: Tensor, dprobs: Tensor, row_max: Tensor, row_sum: Tensor) -> Tensor:
        dscores = torch.empty_like(scores)
        shape, rows = described(scores)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (row_max, row_sum, dscores)]
        arguments = (ctypes.byref(shape), ctypes.byref(rows), ctypes.byref(described(dprobs)[1]), None, *pointers)
        self._demand(self.loaded.attn_cuda_softmax_backward(*place(scores), *arguments), "backward")
        return dscores

    def _demand(self, code: int, what: str) -> None:
        if code != 0:
            self.loaded.attn_cuda_message.restype = ctypes.c_char_p
            raise RuntimeError(f"softmax {what} with tile {self.tile}: {self.loaded.attn_cuda_message(code).decode()}")


def place(tensor: Tensor) -> tuple[int, ctypes.c_void_p]:
    return tensor.device.index, ctypes.c_void_p(torch.cuda.current_stream(tensor.device).cuda_stream)


def described(tensor: Tensor) -> tuple[Shape, Rows]:
    rows, keys = tensor.shape
    code = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[tensor.dtype]
    return Shape((1, 1, rows), keys), Rows(tensor.data_ptr(), code, (0, 0, keys))


def spacing(values: Tensor) -> Tensor:
    """Distance from each float32 value to the next larger one, in float64."""
    return torch.nextafter(values, torch.full_like(values, torch.inf)).double() - values.double()


def accuracy(softmax: Softmax, scores: Tensor) -> Row:
    """Largest errors of the float32 results against float64."""
    probs, row_max, row_sum = softmax.forward(scores)
    exact = torch.softmax(scores.double(), -1)
    exact_sum = (scores.double() - row_max.double().unsqueeze(-1)).exp().sum(-1)
    ulp = (probs.double() - exact).abs() / spacing(exact.float())
    return {
        "max_ulp": float(ulp.max()),
        "mean_ulp": float(ulp.mean()),
        "sum_relative": float(((row_sum.double() - exact_sum) / exact_sum).abs().max()),
    }


def run_speed(builds: dict[int, Softmax], rows: int, keys: int, dtype: torch.dtype, report: Report, rounds: int, flush: Tensor) -> None:
    scores = (torch.randn(rows, keys, device=flush.device) * 3).to(dtype)
    dprobs = torch.randn_like(scores)
    out = torch.empty_like(scores)
    kind = str(dtype).removeprefix("torch.")
    states = {tile: softmax.forward(scores)[1:] for tile, softmax in builds.items()}
    directions: dict[str, dict[str, Call]] = {
        "forward": {f"tile {tile}": partial(softmax.forward, scores) for tile, softmax in builds.items()},
        "backward": {f"tile {tile}": partial(softmax.backward, scores, dprobs, *states[tile]) for tile, softmax in builds.items()},
    }
    for direction, calls in directions.items():
        copy = partial(out.copy_, scores) if direction == "forward" else partial(torch.add, scores, dprobs, out=out)
        times = interleaved({**calls, "copy": copy}, rounds, flush)
        for name, samples in times.items():
            row: Row = {"case": f"{rows}x{keys}", "dtype": kind, "contender": name, "direction": direction, **durations(samples)}
            row["of_copy"] = statistics.median(times["copy"]) / row["median_ms"]
            report.add(row, f"{row['of_copy']:5.2f} of copy, {kind}")


def run_accuracy(builds: dict[int, Softmax], report: Report, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(11)
    for keys in ACCURACY_KEYS:
        for name, deviation in ACCURACY.items():
            scores = torch.randn(ACCURACY_ROWS * 4608 // keys, keys, generator=generator, device=device) * deviation
            for tile, softmax in builds.items():
                row = {"tile": tile, "keys": keys, "scores": name, **accuracy(softmax, scores)}
                report.facts.setdefault("accuracy", []).append(row)
                report.say(f"tile {tile:3} {keys:6} keys {name:7} {row['max_ulp']:5.2f} ulp, sum {row['sum_relative']:.2e}")


def check_against_package(softmax: Softmax, device: torch.device) -> None:
    """The build with the contract's tile has the bytes of the installed package."""
    import attn_cuda

    scores = torch.randn(256, 5000, device=device)
    demand_same_bytes({"attn_cuda": [attn_cuda.joint_attn_softmax(scores)], "tile 256": [softmax.forward(scores)[0]]}, "256x5000")


def main() -> None:
    parser = measuring.options(__doc__, rounds=20)
    parser.add_argument("--tiles", default=",".join(map(str, TILES)), help="comma separated")
    parser.add_argument("--build", type=Path, default=Path("build/tile_sweep"), help="folder of the builds")
    parser.add_argument("--built", action="store_true", help="build nothing: the folder holds N/libattn_cuda_softmax.so of each tile")
    options = parser.parse_args()
    device = measuring.cuda_device("tile_sweep")
    report = Report(
        options.output, "interleaved rounds, L2 flushed before each call, CUDA events, medians; errors against float64", options.seconds
    )
    tiles = [int(tile) for tile in options.tiles.split(",")]
    with ThreadPoolExecutor(min(len(tiles), os.cpu_count() or 1)) as pool:
        libraries = dict(zip(tiles, pool.map(lambda tile: build(tile, options.build.resolve(), options.built), tiles), strict=True))
    builds = {tile: Softmax(ctypes.CDLL(str(library))) for tile, library in libraries.items()}
    assert [softmax.tile for softmax in builds.values()] == tiles
    report.say(f"built {', '.join(map(str, tiles))}")
    report.facts["builds"] = {
        f"softmax-tile-{tile}": {"fingerprint": softmax.fingerprint, "contract": "ordered-v1" if tile == 256 else None}
        for tile, softmax in builds.items()
    }
    with report.guarded("bytes of tile 256"):
        if 256 in builds:
            check_against_package(builds[256], device)
    with report.guarded("accuracy"):
        run_accuracy(builds, report, device)
    report.save()
    flush = flush_buffer(device)
    for rows, keys in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            if report.has_time(f"{rows}x{keys} {dtype}"):
                with report.guarded(f"{rows}x{keys} {dtype}"):
                    run_speed(builds, rows, keys, dtype, report, options.rounds, flush)
                report.save()
                torch.cuda.empty_cache()
    report.finish(options.add)


if __name__ == "__main__":
    main()
