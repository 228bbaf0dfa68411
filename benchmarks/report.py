"""The report of the main job: rows, a text table, JSON and one self-contained HTML page of the same matrix."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from attn_spec._environment import environment
from attn_spec._registry import fingerprints

STATUSES = ("equal", "close", "refused", "absent", "different")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison, refusal or absence. ``fraction`` is the part of the layer's (head, query) rows that was computed."""

    op: str
    backend: str
    device: str
    status: str
    contract: str = "ordered-v1"
    direction: str = "both"
    dtype: str = "-"
    case: str = "-"
    fraction: float = 0.0
    against: str = "-"
    byte_equal: bool = False
    mismatched: int = 0
    max_ulp: int = 0
    reason: str = ""
    seconds: float = 0.0


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write ``report.json`` and ``report.html``."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**environment(), "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "fingerprints": fingerprints()}
    (folder / "report.json").write_text(json.dumps({"environment": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    (folder / "report.html").write_text(_page(rows, facts))


def _columns(rows: Iterable[Row]) -> list[str]:
    return sorted({f"{row.backend} on {row.device}" for row in rows})


def table(rows: Sequence[Row]) -> str:
    """A text table: one line for each operator and engine, the number of rows by status, and the reasons that matter."""
    lines = [f"{'operator':22} {'engine':38} " + " ".join(f"{status:>9}" for status in STATUSES)]
    for op in dict.fromkeys(row.op for row in rows):
        for column in _columns(row for row in rows if row.op == op):
            counts = Counter(row.status for row in rows if row.op == op and f"{row.backend} on {row.device}" == column)
            lines.append(f"{op:22} {column:38} " + " ".join(f"{counts[status] or '-':>9}" for status in STATUSES))
    for status in ("absent", "refused", "different"):
        reasons = dict.fromkeys((f"{row.backend} on {row.device}", row.case, row.reason) for row in rows if row.status == status)
        lines += [f"{status}: {engine}{'' if case == '-' else f', {case}'}: {reason}" for engine, case, reason in reasons]
    counts = Counter(row.status for row in rows)
    lines.append(f"{len(rows)} rows: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES))
    return "\n".join(lines)


_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:110rem;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;width:100%}th,td{border:1px solid #d5dae0;padding:.3rem .5rem;text-align:left;vertical-align:top}
th{background:#f3f5f8;position:sticky;top:0}.equal{background:#d9f2df}.close{background:#e6f0fb}.refused{background:#eceff2;color:#59636e}
.absent{background:#fff;color:#8a939d}.different{background:#fbd5d5;font-weight:600}small{color:#59636e}
@media(prefers-color-scheme:dark){body{background:#14171a;color:#e6e9ec}th{background:#20252b}th,td{border-color:#39414a}
.equal{background:#173d22}.close{background:#16304d}.refused{background:#23282e;color:#9aa4ae}.absent{background:#14171a;color:#7b858f}
.different{background:#5a1d1d}small{color:#9aa4ae}}
"""


def _page(rows: Sequence[Row], facts: dict[str, object]) -> str:
    columns = _columns(rows)
    keys = dict.fromkeys((row.op, row.case, row.dtype, row.direction, f"{row.fraction:.4%}", row.against) for row in rows)
    body = []
    for key in keys:
        cells = []
        for column in columns:
            found = [
                row
                for row in rows
                if (row.op, row.case, row.dtype, row.direction, f"{row.fraction:.4%}", row.against) == key
                and f"{row.backend} on {row.device}" == column
            ]
            cells.append("".join(_cell(row) for row in found[:1]) or "<td></td>")
        body.append("<tr>" + "".join(f"<td>{html.escape(part)}</td>" for part in key) + "".join(cells) + "</tr>")
    heads = ("operator", "case", "dtype", "direction", "rows", "against", *columns)
    counts = Counter(row.status for row in rows)
    summary = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>attn: cross-backend report</title><style>{_STYLE}</style><h1>Cross-backend report</h1><p>{len(rows)} rows: {summary}.</p>"
        f"<p><small>{html.escape(json.dumps(facts))}</small></p><table><thead><tr>"
        + "".join(f"<th>{html.escape(head)}</th>" for head in heads)
        + "</tr></thead><tbody>"
        + "".join(body)
        + "</tbody></table></html>\n"
    )


def _cell(row: Row) -> str:
    note = row.reason or f"{row.seconds:.2f} s"
    return f"<td class={row.status} title='{html.escape(note, quote=True)}'>{row.status}<br><small>{html.escape(note)}</small></td>"
