"""A small causal model of the text of NumPy's sources: quantized to 4 bits after training, or trained with 4-bit attention.

Both arms of a seed begin with the same weights and see the same batches; one trains without quantization, the other with ``qat_attention``.
Both are measured with 4-bit attention on text that neither has seen.

    python docs/examples/qat_training.py --output FOLDER [--device cuda] [--seeds 5] [--processes 5]    # qat_training.json and .svg
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import numpy
import torch
from attn_spec import QATConfig, get_op
from torch import Tensor, nn

CONFIG = QATConfig.training(causal=True)
ARMS = ("post-training", "qat")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """``width`` is that of the model, ``heads * head_dim`` that of its attention; ``warmup`` steps are common to both arms."""

    width: int = 64
    heads: int = 4
    head_dim: int = 16
    context: int = 64
    batch: int = 32
    warmup: int = 1000
    steps: int = 200
    every: int = 20
    held_out: int = 512
    rate: float = 3e-3
    last_rate: float = 1e-3


class Layer(nn.Module):
    """Bytes and learned positions, causal attention, a position-wise network, logits."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width, inner = recipe.width, recipe.heads * recipe.head_dim
        self.heads, self.head_dim = recipe.heads, recipe.head_dim
        self.symbols, self.places = nn.Embedding(256, width), nn.Embedding(recipe.context, width)
        self.qkv, self.out = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
        self.network = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.before, self.after, self.logits = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor, attend: Attend) -> Tensor:
        """text int64 [B, S] to logits [B, S, 256]."""
        x = self.symbols(text) + self.places.weight[: text.shape[1]]
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        logits: Tensor = self.logits(self.after(x + self.network(x)))
        return logits


def attends(device: str) -> dict[str, Attend]:
    """What each arm trains with."""
    exact, four_bit = get_op("attention", device=device), get_op("qat_attention", device=device, config=CONFIG)
    return {"post-training": lambda q, k, v: exact(q, k, v, causal=True), "qat": lambda q, k, v: four_bit(q, k, v, causal=True)}


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes of NumPy's own sources; the last tenth is held out."""
    files = sorted((Path(numpy.__file__).parent / "lib").glob("*.py"))
    text = torch.tensor(list(b"\n".join(file.read_bytes() for file in files)))
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Random pieces [count, context + 1]."""
    starts = torch.randint(len(text) - context - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(context + 1)]


def loss_of(model: Layer, pieces: Tensor, attend: Attend) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(model(pieces[:, :-1], attend).flatten(0, 1), pieces[:, 1:].flatten())


@torch.no_grad()
def measured(model: Layer, pieces: Tensor, attend: Attend) -> float:
    return float(loss_of(model, pieces, attend))


def train(model: Layer, batches: list[Tensor], attend: Attend, rate: float, before_step: Callable[[int], None] = lambda _: None) -> None:
    """One step of AdamW a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step, batch in enumerate(batches):
        before_step(step)
        optimizer.zero_grad()
        loss_of(model, batch, attend).backward()
        optimizer.step()


def run(seed: int, recipe: Recipe, device: str = "cpu") -> dict[str, list[float]]:
    """Held-out losses with 4-bit attention by arm, before the first of ``recipe.steps`` and after every ``recipe.every``; under "exact" the
    last one of the unquantized arm without quantization."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    text, held_out = corpus()
    attend = attends(device)
    batches = [windows(text, recipe.batch, recipe.context, generator).to(device) for _ in range(recipe.warmup + recipe.steps)]
    unseen = windows(held_out, recipe.held_out, recipe.context, torch.Generator().manual_seed(0)).to(device)
    model = Layer(recipe).to(device)
    train(model, batches[: recipe.warmup], attend["post-training"], recipe.rate)
    curves: dict[str, list[float]] = {}
    for name in ARMS:
        arm = Layer(recipe).to(device)
        arm.load_state_dict(model.state_dict())
        curve: list[float] = []

        def note(step: int, arm: Layer = arm, curve: list[float] = curve) -> None:
            if step % recipe.every == 0:
                curve.append(measured(arm, unseen, attend["qat"]))

        train(arm, batches[recipe.warmup :], attend[name], recipe.last_rate, note)
        curves[name] = [*curve, measured(arm, unseen, attend["qat"])]
        if name == "post-training":
            curves["exact"] = [measured(arm, unseen, attend[name])]
    return curves


def summary(seeds: Mapping[str, Mapping[str, list[float]]]) -> dict[str, float]:
    """Last losses averaged over the seeds, what training with 4 bits gains, and how far seeds lie apart in that gain."""
    last = {name: [curves[name][-1] for curves in seeds.values()] for name in (*ARMS, "exact")}
    gains = [after - trained for after, trained in zip(last["post-training"], last["qat"], strict=True)]
    means = {name: statistics.fmean(values) for name, values in last.items()}
    return {**means, "gain": statistics.fmean(gains), "least gain": min(gains), "spread": max(gains) - min(gains)}


def drawing(seeds: Mapping[str, Mapping[str, list[float]]], every: int) -> str:
    """An SVG of every seed's curves, the unquantized loss dashed."""
    width, height, edge = 640, 360, 56
    values = [value for curves in seeds.values() for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    points = max(len(curves["qat"]) for curves in seeds.values()) - 1

    def place(step: float, loss: float) -> str:
        return f"{edge + step / points * (width - 2 * edge):.1f},{edge + (high - loss) / (high - low) * (height - 2 * edge):.1f}"

    lines = []
    for curves in seeds.values():
        for name, colour in zip(ARMS, ("#c2410c", "#1d4ed8"), strict=True):
            path = " ".join(place(step, loss) for step, loss in enumerate(curves[name]))
            lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        ends = " ".join(place(step, curves["exact"][-1]) for step in (0, points))
        lines.append(f'<polyline points="{ends}" fill="none" stroke="#6b7280" stroke-dasharray="4 4"/>')
    texts = [
        (edge, 24, "#c2410c", "trained without quantization, measured in 4 bits"),
        (edge, 42, "#1d4ed8", "trained and measured in 4 bits"),
        (edge + 330, 24, "#6b7280", "dashed: never quantized"),
        (4, edge + 4, "#111827", f"{high:.3f}"),
        (4, height - edge + 4, "#111827", f"{low:.3f}"),
        (width - edge - 90, height - edge + 24, "#111827", f"{points * every} steps"),
    ]
    lines += [
        f'<text x="{x}" y="{y}" fill="{colour}" font-family="sans-serif" font-size="13">{text}</text>' for x, y, colour, text in texts
    ]
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">\n' + "\n".join(lines) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="seeds that run side by side")
    given, recipe = parser.parse_args(), Recipe()
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(run, seed, recipe, given.device) for seed in range(given.seeds)]
        seeds = {str(seed): future.result() for seed, future in enumerate(runs)}
    found = summary(seeds)
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    versions = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": device,
        "config": CONFIG.fingerprint,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    document = {"environment": versions, "recipe": asdict(recipe), "summary": found, "seeds": seeds}
    (given.output / "qat_training.json").write_text(json.dumps(document, indent=1) + "\n")
    (given.output / "qat_training.svg").write_text(drawing(seeds, recipe.every))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
