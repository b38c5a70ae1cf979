"""Draws the tables of docs/benchmarks.md, for people who would rather look than read.

    python -m benchmarks.plots            # writes docs/plots/*.svg; needs the extra "plot"
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).resolve().parents[1] / "docs"
matplotlib.rcParams |= {"svg.hashsalt": "stretto", "font.size": 10, "axes.spines.top": False,
                        "axes.spines.right": False, "legend.frameon": False}


def table(start: str) -> list[list[str]]:
    """The cells of the table whose header begins so, header first."""
    rows: list[list[str]] = []
    for line in (DOCS / "benchmarks.md").read_text().splitlines():
        if rows or line.startswith(f"| {start}"):
            if not line.startswith("|"):
                break
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    if len(rows) < 3:
        raise SystemExit(f"docs/benchmarks.md has no table that begins with {start!r}")
    return [rows[0], *rows[2:]]


def number(cell: str) -> float:
    """The first number of a cell; 0.0 where there is none."""
    found = re.search(r"[\d.]+", cell)
    return float(found.group()) if found else 0.0


def save(name: str) -> None:
    (DOCS / "plots").mkdir(exist_ok=True)
    plt.tight_layout()
    plt.savefig(DOCS / "plots" / f"{name}.svg", metadata={"Date": None})
    plt.close()


def drafters() -> None:
    header, *rows = table("T = 0 ")
    kinds = header[1:9]
    plt.figure(figsize=(9, 3.4))
    each = 0.8 / len(rows)
    for i, row in enumerate(rows):
        plt.bar([k + (i - (len(rows) - 1) / 2) * each for k in range(len(kinds))], [number(cell) for cell in row[1:9]],
                0.95 * each, label=row[0].replace("`", ""))
    plt.axhline(1, color="0.5", linewidth=0.8)
    plt.xticks(range(len(kinds)), kinds)
    plt.ylabel("tokens a step (1: no drafts)")
    plt.legend(ncol=len(rows), loc="upper center", bbox_to_anchor=(0.5, 1.16))
    save("drafters")


def decode() -> None:
    header, *rows = table("decode, 8B shape")
    rows = [row for row in rows if re.match(r"\d+ rows?(, context 1k)?$", row[0])]
    names = [str(int(number(row[0]))) for row in rows]
    plt.figure(figsize=(7, 3.2))
    for i, column in enumerate(("vLLM", "measured", "limit")):
        at = header.index(column)
        label = {"measured": "Stretto", "limit": "limit of the card"}.get(column, column)
        plt.bar([k + (i - 1) * 0.27 for k in range(len(rows))], [number(row[at]) for row in rows], 0.26, label=label)
    plt.xticks(range(len(rows)), names)
    plt.xlabel("sequences that decode, context 1k, 8B model, one H200")
    plt.ylabel("ms a step")
    plt.legend()
    save("decode")


def elastic() -> None:
    header, *rows = table("rows, context, acceptance")
    at, plain = header.index("elastic / best"), header.index("best fixed")
    shares = [number(row[header.index("none")].replace(",", "")) / number(row[plain].split(":")[1].replace(",", ""))
              for row in rows]
    plt.figure(figsize=(8, 3.8))
    for i, row in enumerate(rows):
        ratio, low, high = (float(n) for n in re.findall(r"[\d.]*\d", row[at])[:3])
        plt.plot([low, high], [-i, -i], color="tab:blue", linewidth=1.5)
        plt.plot(ratio, -i, "o", color="tab:blue", label="elastic" if i == 0 else None)
        if shares[i]:
            plt.plot(shares[i], -i, "|", color="0.4", markersize=12, label="no drafts" if i == 0 else None)
    plt.axvline(1, color="0.5", linewidth=0.8)
    plt.axvline(0.98, color="0.5", linewidth=0.8, linestyle=":")
    plt.yticks([-i for i in range(len(rows))], [row[0] for row in rows], fontsize=8)
    plt.xlabel("tokens a second, of the best fixed number of drafts (dotted: 0.98)")
    plt.legend(ncol=2, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    save("elastic")


if __name__ == "__main__":
    drafters()
    decode()
    elastic()
