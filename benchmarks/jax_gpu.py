"""The cuda engine of attn-jax-rocm-sink beside JAX's own attention on an NVIDIA GPU: medians of interleaved calls on random data.

    python benchmarks/jax_gpu.py --output benchmarks/results/jax-h200.json [--rounds 20] [--seconds 300] [--add FILE]
    python benchmarks/jax_gpu.py --output FILE --contract sm90-v1 --rounds 8 --seconds 50     # Hopper's tensor cores alone

``--add`` keeps the rows of other cases that FILE, an earlier result, has. The layer of gpt-oss comes first.

Peers are ``jax.nn.dot_product_attention`` with implementations "xla" and "cudnn". A peer that does not run a case here is refused with its
reason. Outputs are compared before anything is timed. A sample runs the compiled program several times in a row, so that the host's time to
enqueue it hides behind the GPU's; inputs are read again from memory where they exceed the L2 cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import measuring
from jax_contenders import Case, arrays_of, backward_of, forward_of, largest_difference, ours, theirs

REPEATS = 5
METHOD = (
    f"wall time of {REPEATS} compiled calls in a row, block_until_ready at the end, divided by {REPEATS}; rounds interleave the contenders "
    "after two warm-up samples; standard normal data; direction both is forward with the gradients of q, k and v, "
    "and of the sinks where there are some"
)
CASES = (
    Case(1, 64, 8, 4096, 64, "bfloat16", window=127, sinks=True),
    Case(1, 64, 8, 4096, 64, "bfloat16", window=127),
    Case(2, 16, 16, 2048, 64, "float32"),
    Case(4, 16, 16, 2048, 128, "bfloat16"),
    Case(4, 16, 16, 2048, 128, "bfloat16", causal=False),
    Case(2, 32, 8, 4096, 128, "bfloat16"),
    Case(1, 64, 8, 4096, 64, "bfloat16", window=127, sinks=True, contract="sm90-v1"),
    Case(1, 64, 8, 4096, 64, "bfloat16", window=127, contract="sm90-v1"),
    Case(4, 16, 16, 2048, 128, "bfloat16", contract="sm90-v1"),
    Case(2, 32, 8, 4096, 128, "bfloat16", contract="sm90-v1"),
)
PEERS = ("xla", "cudnn")
CLOSE = {"float32": 1e-2, "bfloat16": 6e-2}  # the peers may use TF32


def sample(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    results = [call() for _ in range(REPEATS)]
    jax.block_until_ready(results)
    return 1e3 * (time.perf_counter() - begin) / REPEATS


def built(case: Case, direction: str, report: measuring.Report) -> dict[str, Callable[[], Any]]:
    """Programs of our engine and of the peers that run the case."""
    program = {"forward": forward_of, "both": backward_of}[direction]
    arrays = arrays_of(case)
    calls = {"cuda": program(ours(case, "cuda"), arrays)}
    expected = jax.block_until_ready(calls["cuda"]())
    for peer in () if case.sinks else PEERS:
        try:
            call = program(theirs(case, peer), arrays)
            found = jax.block_until_ready(call())
        except Exception as error:  # a peer names what it lacks in errors of many kinds
            report.refuse(f"{peer} {case} {direction}", f"{type(error).__name__}: {str(error)[:300]}")
            continue
        difference = largest_difference(found, expected)
        if difference > CLOSE[case.dtype]:
            raise measuring.Different(f"cuda and {peer} differ by {difference:.3g} on {case}; nothing was timed")
        calls[peer] = call
    return calls


def run(case: Case, rounds: int, report: measuring.Report) -> None:
    for direction in ("forward", "both"):
        calls = built(case, direction, report)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for index in range(rounds + 2):
            for name, call in calls.items():
                elapsed = sample(call)
                if index >= 2:
                    times[name].append(elapsed)
        for name, samples in times.items():
            report.add({"case": str(case), "contender": name, "direction": direction, **measuring.durations(samples)}, "")
    for peer in PEERS:
        report.compare("cuda", peer)
    report.save()


def main() -> None:
    parser = measuring.options(__doc__, rounds=20)
    parser.add_argument("--contract", choices=["ordered-v1", "sm90-v1"], help="only the cases of one contract")
    options = parser.parse_args()
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        raise SystemExit(f"jax_gpu: JAX has no CUDA device: {error}") from error
    facts = {"jax": jax.__version__, "jax_device": device.device_kind, "platform_version": device.client.platform_version}
    report = measuring.Report(options.output, METHOD, options.seconds, facts=facts)
    for case in CASES:
        if options.contract not in (None, case.contract or "ordered-v1"):
            continue
        if report.has_time(str(case)):
            with report.guarded(str(case)):
                run(case, options.rounds, report)
    report.finish(options.add)


if __name__ == "__main__":
    main()
