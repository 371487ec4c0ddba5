"""What a run leaves behind: the result, its curves, maps and times, and the pages that show them.

Nothing here imports torch: a report is made again from the files of a run in a moment.
"""

from softs_lightning.report.curves import (
    Curves,
    draw_curve,
    draw_curves,
    read_curves,
    read_metrics,
    write_metrics,
)
from softs_lightning.report.result import Arm, Measure, Result, Stop
from softs_lightning.report.similarity import LayerMap, Similarity, draw_similarity
from softs_lightning.report.timing import PHASES, Timing, draw_timing

__all__ = [
    "PHASES",
    "Arm",
    "Curves",
    "LayerMap",
    "Measure",
    "Result",
    "Similarity",
    "Stop",
    "Timing",
    "draw_curve",
    "draw_curves",
    "draw_similarity",
    "draw_timing",
    "read_curves",
    "read_metrics",
    "write_metrics",
]
