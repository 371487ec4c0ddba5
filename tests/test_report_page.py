"""What a browser makes of the pages, at the width of a telephone and of a desk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from softs_lightning.report import Arm, Measure, Result, Similarity, Stop, Timing
from softs_lightning.report.comparison import write_comparison
from softs_lightning.report.page import document, paragraph, picture, table
from softs_lightning.report.run import RESULTS, write_report
from softs_lightning.report.similarity import LayerMap
from softs_lightning.report.timing import PHASES
from tests.chromium import look

WIDTHS = (400, 1100, 1400)


def result(*, arms: int, measures: int) -> Result:
    names = tuple(Measure(f"measure number {n}", "%" if n % 2 else "", n == 2) for n in range(measures))
    seeds = (0, 1, 2)

    def scores(base: float) -> tuple[dict[str, float], ...]:
        return tuple({m.name: base + 1.5 * seed + 3 * n for n, m in enumerate(names)} for seed in seeds)

    ways = [
        Arm("alone" if n == 0 else f"way {n} & <more>", scores(50 + 4 * n), 1_234_567 * (n + 1), flops=10**9)
        for n in range(arms)
    ]
    ways[1] = Arm(ways[1].name, ways[1].scores, 7, (Stop("encoder.layer.3.attention.output.dense", 0.3),), 9)
    return Result("recipe", names, seeds, scores(90)[0], 110_000_000, tuple(ways), 22 * 10**9)


def write_run(folder: Path, found: Result) -> None:
    """A run's folder with everything that a run may write, and long names in it."""
    folder.mkdir(parents=True)
    (folder / RESULTS).write_text(found.to_json())
    rows = ["student,seed,step,metric,value"]
    for metric in (
        "val_accuracy",
        "train_loss",
        "distill/a_rather_long_name_of_a_pair/of_layers",
        "distill/total",
    ):
        rows += [
            f"{arm.name},{seed},{step},{metric},{seed + step * (n + 1)}"
            for n, arm in enumerate(found.arms)
            for seed in found.seeds
            for step in (0, 10, 20)
        ]
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    teacher = tuple(f"encoder.layer.{n}" for n in range(24))
    layers = tuple(f"student.encoder.encoder.layer.{n}.output" for n in range(16))
    one = LayerMap(layers, tuple(tuple((r * c % 7) / 7 for c in range(16)) for r in range(24)))
    names = [arm.name for arm in found.arms]
    agreement = {name: {"agreement": 0.5, "kl": 0.25, "cosine": float("nan")} for name in names}
    similar = Similarity(
        256, "validation", 0, teacher, dict.fromkeys(names[:2], one), agreement, {"x": "y" * 300}
    )
    (folder / "similarity.json").write_text(similar.to_json())
    shares = dict(zip(PHASES, (0.1, 0.4, 0.2, 0.05, 0.1, 0.05, 0.1), strict=True))
    (folder / "timing.json").write_text(Timing(names[1], 0, 20, 0.1, shares).to_json())
    (folder / "config.yaml").write_text(f"key: {'v' * 400}\n")
    (folder / "run.json").write_text('{"command": "softs-distill ' + "x" * 300 + '"}')


@pytest.mark.parametrize(("arms", "measures"), [(2, 1), (5, 7)])
def test_a_report_is_whole_at_both_widths(tmp_path: Path, arms: int, measures: int) -> None:
    found = result(arms=arms, measures=measures)
    write_run(tmp_path / "run", found)
    write_report(tmp_path / "run")
    gains = arms - 1
    first = measures + 1 if measures > 4 else 1 + arms + gains
    pictures = min(measures, 6) + 4 + 2 + 1
    for seen in look((tmp_path / "run" / "report.html").read_text(), *WIDTHS):
        assert seen["problems"] == []
        assert seen["width"] in WIDTHS
        assert seen["images"] == pictures
        assert seen["tables"] == [first, 1 + arms, arms, len(PHASES), *[len(found.seeds)] * measures]


def test_a_comparison_is_whole_at_every_width(tmp_path: Path) -> None:
    teachers = ("outputs[encoder.layer.3.attention.output.dense]", "outputs[head]")
    task = ["student.width=16,32", "pairs.0.teacher=" + ",".join(f"'{one}'" for one in teachers)]
    (tmp_path / "multirun.yaml").write_text(json.dumps({"hydra": {"overrides": {"task": task}}}))
    for number, (width, teacher) in enumerate(zip((16, 32), teachers, strict=True)):
        write_run(tmp_path / str(number), result(arms=3, measures=1))
        (tmp_path / str(number) / ".hydra").mkdir()
        (tmp_path / str(number) / ".hydra" / "overrides.yaml").write_text(
            f"- student.width={width}\n- pairs.0.teacher={teacher}\n"
        )
    write_comparison(tmp_path)
    for seen in look((tmp_path / "comparison.html").read_text(), *WIDTHS, 950, 800):
        assert seen["problems"] == []
        assert (seen["images"], seen["tables"]) == (2, [6])


def test_a_page_is_dark_where_the_reader_wants_it_so() -> None:
    page = document("title", [paragraph("text")])
    ((light,), (dark,)) = look(page, 400), look(page, 400, dark=True)
    assert (light["background"], light["ink"]) == ("rgb(255, 255, 255)", "rgb(27, 31, 36)")
    assert (dark["background"], dark["ink"]) == ("rgb(13, 17, 23)", "rgb(230, 237, 243)")


def test_the_check_notices_what_is_wrong(tmp_path: Path) -> None:
    broken = tmp_path / "a.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    wide = '<p style="white-space: nowrap">' + "word " * 90 + "</p>"
    hidden = '<p style="overflow: hidden; white-space: nowrap; width: 50px">too long for its place</p>'
    (seen,) = look(document("t", [wide, hidden, picture(broken, "x"), table(("", "a"), [("r", "1")])]), 400)
    said = "\n".join(seen["problems"])
    assert all(what in said for what in ("the page is", "text outside", "cut", "broken image"))


def test_the_check_notices_a_word_that_is_split_or_cut_in_a_table() -> None:
    cells = table(("student", "distilled"), [("alone", "incomprehensibilities")])
    (seen,) = look(document("t", [cells]), 1100)
    assert seen["problems"] == []
    narrow = "<style>table { width: 60px; table-layout: fixed } @@</style>"
    for style, what in (
        (
            "main * { overflow-wrap: anywhere }",
            ("a broken word, incomprehensibilities", "words may be split"),
        ),
        ("main * { word-break: break-all }", ("a broken word, incomprehensibilities", "words may be split")),
        (".scroll { overflow: hidden !important; width: 60px }", ("cut",)),
        ("td { overflow: hidden }", ("cut",)),
    ):
        (seen,) = look(document("t", [narrow.replace("@@", style), cells]), 1100)
        said = "\n".join(seen["problems"])
        assert all(part in said for part in what), (style, said)


def test_what_is_written_into_a_page_is_text() -> None:
    page = document("<script>", [table(("", "<i>"), [("<b>", "&amp;")]), paragraph("a < b")])
    assert "<script>" not in page
    assert "&lt;b&gt;" in page
    assert "&amp;amp;" in page
    assert "a &lt; b" in page
