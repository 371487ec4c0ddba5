"""How alike student and teacher are, layer by layer: what was measured, and its map."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from matplotlib.figure import Figure

from softs_lightning.report.result import Row
from softs_lightning.report.style import INK, figure, literal

__all__ = ["AGREEMENT", "LayerMap", "Similarity", "draw_similarity"]

AGREEMENT = {
    "agreement": ("same top class as the teacher (%)", 100.0, 1),
    "kl": ("KL from the teacher (nats)", 1.0, 3),
    "cosine": ("cosine to the teacher's output", 1.0, 3),
}
"""Metric → what it is called, what it is multiplied by, digits."""


@dataclass(frozen=True)
class LayerMap:
    """Linear CKA of each layer of a student with each layer of its teacher.

    Attributes:
        layers: of the student, in the order in which they run.
        cka: a row for each layer of the teacher; no number where a layer does not vary over the samples.
    """

    layers: tuple[str, ...]
    cka: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Similarity:
    """Students and their teacher on the same held-out samples, for the first seed.

    Attributes:
        samples: how many there were.
        part: of which part of the data.
        seed: of the students.
        teacher: its layers, in the order in which they run.
        students: arm → its map.
        agreement: arm → metric → how alike the outputs are.
        missing: why something could not be measured, by whom it was to be measured of.
    """

    samples: int
    part: str
    seed: int
    teacher: tuple[str, ...]
    students: Mapping[str, LayerMap] = field(default_factory=dict)
    agreement: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """For :meth:`from_json`; a number that is none is null."""
        return json.dumps(_nulls(asdict(self)), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Similarity:
        """Read what :meth:`to_json` wrote."""
        node = json.loads(text)
        students = {
            arm: LayerMap(tuple(one["layers"]), tuple(tuple(map(_number, row)) for row in one["cka"]))
            for arm, one in node["students"].items()
        }
        agreement = {
            arm: {name: _number(value) for name, value in one.items()}
            for arm, one in node["agreement"].items()
        }
        teacher = tuple(node["teacher"])
        return cls(node["samples"], node["part"], node["seed"], teacher, students, agreement, node["missing"])

    def basis(self) -> str:
        """What the numbers were measured on."""
        return f"{self.samples} {self.part} samples, students of seed {self.seed}"

    def agreement_rows(self) -> list[Row]:
        """Header and one row for each arm; empty where no measure of agreement fits."""
        names = [name for name in AGREEMENT if any(name in one for one in self.agreement.values())]
        if not names:
            return []
        rows: list[Row] = [("", *(AGREEMENT[name][0] for name in names))]
        for arm, one in self.agreement.items():
            cells = (_cell(one.get(name, math.nan), *AGREEMENT[name][1:]) for name in names)
            rows.append((f"student {arm}", *cells))
        return rows

    def reasons(self) -> Iterator[str]:
        """A sentence for each thing that could not be measured."""
        for what, why in self.missing.items():
            yield f"Not measured: {what}: {why.rstrip('.')}."


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _nulls(node: Any) -> Any:
    if isinstance(node, float):
        return node if math.isfinite(node) else None
    if isinstance(node, Mapping):
        return {key: _nulls(value) for key, value in node.items()}
    return [_nulls(value) for value in node] if isinstance(node, (list, tuple)) else node


def _cell(value: float, scale: float, digits: int) -> str:
    return f"{scale * value:.{digits}f}" if math.isfinite(value) else "–"


def draw_similarity(found: Similarity, arm: str) -> Figure:
    """The map of one arm: rows are the teacher's layers, columns the student's, from input to output."""
    seen = found.students[arm]
    rows, columns = len(found.teacher), len(seen.layers)
    small = rows * columns > 150 or columns > 14
    drawn = figure(1.9 + max(2.6, 0.34 * columns), 1.5 + max(1.6, 0.26 * rows))
    axes = drawn.add_subplot()
    picture = axes.imshow(seen.cka, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
    axes.set_xticks(range(columns), [_short(name) for name in seen.layers], rotation=90)
    axes.set_yticks(range(rows), [_short(name) for name in found.teacher])
    axes.tick_params(labelsize=7, colors=INK, length=2)
    axes.set_xlabel("student's layer, input → output", fontsize=9, color=INK)
    axes.set_ylabel("teacher's layer, input → output", fontsize=9, color=INK)
    axes.set_title(literal(f"student {arm}"), fontsize=10, color=INK)
    if not small:
        _numbers(axes, seen.cka)
    bar = drawn.colorbar(picture, ax=axes, pad=0.02)
    bar.set_label("linear CKA (0 … 1)", fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7)
    return drawn


def _numbers(axes: Any, cka: Sequence[Sequence[float]]) -> None:
    for y, row in enumerate(cka):
        for x, value in enumerate(row):
            shade = "black" if value > 0.6 else "white"
            text = f"{value:.2f}".lstrip("0") if math.isfinite(value) else "–"
            axes.text(x, y, text, ha="center", va="center", fontsize=6.5, color=shade)


def _short(name: str, room: int = 26) -> str:
    return name if len(name) <= room else "…" + name[1 - room :]
