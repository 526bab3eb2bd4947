"""Writes the tables of the README and docs from benchmarks/results: `python benchmarks/tables.py` (`--check` only compares).

The table between `<!-- table: NAME -->` and `<!-- end of table -->` contains only figures from results/NAME.json.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def vision(result: dict[str, Any]) -> list[str]:
    """Compares drivetrain with each other program, at the same work and batch."""
    lines = ["| guide 001's net | batch | images/s | drivetrain | |", "|---|--:|--:|--:|--:|"]
    rows = result["rows"]
    for row in rows:
        if "drivetrain" in row["name"] or row["name"].startswith(" "):  # a leading space marks variants of drivetrain
            continue
        ours = next(r for r in rows if (r["work"], r["batch"], r["name"]) == (row["work"], row["batch"], "drivetrain"))
        ratio = ours["images_per_second"] / row["images_per_second"]
        lines.append(
            f"| {row['name']}, {row['work']} | {row['batch']:,} | {row['images_per_second']:,.0f} |"
            f" {ours['images_per_second']:,.0f} | **{ratio:.1f}x** |"
        )
    return lines


def vision_variants(result: dict[str, Any]) -> list[str]:
    """Shows how much each of drivetrain's optimizations gains."""
    lines = ["| drivetrain, batch 128, augmented | images/s |", "|---|--:|"]
    for row in result["rows"]:
        if row["batch"] == 128 and row["work"] == "augmented" and (row["name"] == "drivetrain" or row["name"].startswith(" ")):
            name = "captured and compiled (what a long run gets)" if row["name"] == "drivetrain" else row["name"].strip()
            lines.append(f"| {name} | {row['images_per_second']:,.0f} |")
    return lines


def accuracy(result: dict[str, Any]) -> list[str]:
    lines = ["| recipe | test accuracy | time to accuracy | whole training |", "|---|--:|--:|--:|"]
    for row in result["rows"]:
        reached = "not reached" if row["seconds_to_bar"] is None else f"{100 * row['bar']:.1f} % after {row['seconds_to_bar']:.1f} s"
        lines.append(f"| {row['recipe']} | {100 * row['accuracy']:.2f} % | {reached} | {row['seconds_of_training']:.1f} s |")
    return lines


def plan(result: dict[str, Any]) -> list[str]:
    """Shows the largest errors of each model's predictions: from the description, and at unmeasured micro-batches after measuring."""
    lines = [
        "| model | micro-batches | memory | time | order (tau) | memory, measured | time, measured | chosen, of the best |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for model in result["rows"]:
        rows = model["sizes"]
        unmeasured = [r for r in rows if not r["probed"]]
        memory = max((r["memory_error"] for r in rows), key=abs)
        factor = max((r["time_factor"] for r in rows), key=lambda factor: abs(math.log(factor)))
        fitted_memory, fitted_time = (_largest_error(unmeasured, name) for name in ("fitted_memory_error", "fitted_time_error"))
        name = f"{model['model']} (unseen)" if model["unseen"] else model["model"]
        lines.append(
            f"| {name} | {rows[0]['micro_batch']} to {rows[-1]['micro_batch']:,} | {100 * memory:+.1f} % | x {factor:.2f} |"
            f" {model['kendall_tau']:.2f} | {fitted_memory} | {fitted_time} | {100 * model['chosen']['measured']['of_the_best']:.0f} % |"
        )
    return lines


def _largest_error(rows: list[dict[str, Any]], name: str) -> str:
    return f"{100 * max((r[name] for r in rows), key=abs):+.1f} %" if rows else "-"


def plan_candidates(result: dict[str, Any]) -> list[str]:
    lines = ["| model | candidate, micro-batch | memory | predicted | time of a step | predicted |", "|---|---|--:|--:|--:|--:|"]
    for row in result["rows"]:
        size = f"{row['micro_batch']:,}{', the largest that should fit' if row['largest'] else ''}"
        lines.append(
            f"| {row['model']} | {row['way']}, {size} | {row['peak_bytes'] / 2**30:.1f} GiB | {100 * row['memory_error']:+.1f} % |"
            f" {1e3 * row['step_seconds']:,.0f} ms{', ' * bool(row['kind'])}{row['kind']} | x {row['time_factor']:.2f} |"
        )
    return lines


def rl(result: dict[str, Any]) -> list[str]:
    """Compares PureJaxRL's configuration with drivetrain, for the built-in environment and a user's own, at each size."""
    lines = [
        "| CartPole, environments x steps | PureJaxRL's configuration, JAX | drivetrain | | an environment of your own, in torch | |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        peer, ours, own = (row[k]["steps_per_second"] for k in ("peer", "built_in", "own_world"))
        lines.append(
            f"| {row['envs']:,} x {row['horizon']} | {peer / 1e6:.1f} M steps/s | {ours / 1e6:.0f} M | **{ours / peer:.1f}x** |"
            f" {own / 1e6:.0f} M | {own / peer:.1f}x |"
        )
    return lines


def lora(result: dict[str, Any]) -> list[str]:
    lines = [
        "| SmolLM2's shape, batch x tokens | Trainer + peft, tokens/s | memory | drivetrain, tokens/s | memory | of the peak | |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        peer, ours = row["trainer"], row["drivetrain"]
        texts = "" if row["texts"] == "full rows" else f", texts of {row['texts']}"
        lines.append(
            f"| {row['shape'].upper()}, {row['batch']} x {row['context']:,}{texts} | {peer['tokens_per_second']:,} | {peer['memory_gib']:.1f} GiB |"
            f" {ours['tokens_per_second']:,} | {ours['memory_gib']:.1f} GiB | {ours['mfu_percent']:.0f} % | **{row['ratio']:.1f}x** |"
        )
        if "padded" in row:
            own = row["padded"]
            lines.append(
                f"| the same without packing | | | {own['tokens_per_second']:,} | {own['memory_gib']:.1f} GiB | {own['mfu_percent']:.0f} % |"
                f" packing alone: **{row['packing_ratio']:.1f}x** |"
            )
    return lines


TABLE_OF_RESULT = {
    "plan-h200": plan,
    "plan-ways-h200": plan_candidates,
    "vision-h200": vision,
    "vision-h200-ways": vision_variants,
    "accuracy-h200": accuracy,
    "vision-cpu": vision,
    "rl-h200": rl,
    "lora-h200": lora,
}


def with_tables(text: str) -> str:
    """Returns a page's text with all tables updated."""

    def updated_table(match: re.Match[str]) -> str:
        name = match[2]
        result = json.loads((ROOT / "benchmarks" / "results" / f"{name.removesuffix('-ways')}.json").read_text())
        origin = f"{result['hardware']}, torch {result['torch']}, {result['date']}, `{result['command']}`"
        return f"{match[1]}\n" + "\n".join(TABLE_OF_RESULT[name](result)) + f"\n\n{origin}\n\n{match[3]}"

    return TABLE.sub(updated_table, text)


def main() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("speed", "plan", "rl", "lora"))):
        old = page.read_text()
        new = with_tables(old)
        if old != new:
            if "--check" in sys.argv:
                sys.exit(f"{page.name} does not show the figures of benchmarks/results: run python benchmarks/tables.py")
            page.write_text(new)


if __name__ == "__main__":
    main()
