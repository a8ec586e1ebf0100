"""What the pages show, that sampled text stays text, and that they load nothing."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megarl.config.load import load_config
from megarl.telemetry.curves import (
    Curve,
    Panel,
    compared_panels,
    draw_png,
    line_styles,
    run_panels,
    svg,
)
from megarl.telemetry.report import write_comparison, write_report
from megarl.weights.plan.from_config import plan_weights

HOSTILE = """</pre></article><script>alert(1)</script><img src=x onerror=alert(2)><svg/onload=alert(3)><!-- --><style>
*{display:none}</style><iframe srcdoc="<b>"></iframe> ' " & &lt;b&gt; \x00 \u2028 $x^2$ ]]> <a href="javascript:0">"""
MARK = "hostile"


class Page(HTMLParser):
    """Counts elements, attributes that name a resource or a handler, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def write_run(
    folder: Path, *, steps: int = 6, text: str = "said", config: str = "train: {lr: 1.0e-6}\n"
) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    rows = [
        {
            "step": step,
            "reward/mean": 0.1 * step,
            "kl/ref": 0.01,
            "time/step": 1.0,
            "length/mean": 5.0,
            "layout": "1",
        }
        | {
            "world_size": 1,
            "reward/accuracy/mean": 0.1,
            f"reward/{text}/mean": 0.2,
            "logprob_diff/max": 0.0,
        }
        for step in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = '"step": 4, "accuracy": 0.5, "accuracy/low": 0.375, "accuracy/high": 0.625'
    (folder / "eval.jsonl").write_text(f'{{"step": 0, "accuracy": 0.25}}\n{{{evaluated}}}\n')
    (folder / "config.yaml").write_text(config)
    for step in (steps - 2, steps - 1):
        lines = [
            sample(i, f"{text} {step}/{i}.") for i in (3, 0, 11, 7, 1, 2, 11, 5, 4, 0, 9, 6, 10, 8)
        ]
        written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(written)
    return folder


def sample(index: int, text: str) -> dict[str, Any]:
    values = {
        "prompt": text,
        "response": text,
        "answer": text,
        "reward": index / 10,
        "rewards": {text: 0.5},
    }
    return values | {
        "length": index,
        "truncated": index == 11,
        "finish": "stop",
        "advantage": 0.25 if index else None,
    }


def test_samples_are_grouped_by_reward(tmp_path: Path) -> None:
    """Twelve samples with rewards of their own, two of them twice: ranges of three, the best first."""
    page = write_report(write_run(tmp_path / "a")).read_text()
    assert "<h2>Samples of step 5</h2>" in page
    shown = [int(index) for index in re.findall(r"<pre>said 5/(\d+)\.</pre>", page)]
    assert shown == [*range(11, -1, -1)], "each once"
    links = re.findall(r'<a href="#(reward-\d)">(.*?) <small>\((\d+)\)</small></a>', page)
    labels = ["1 to 1.1", "0.7 to 0.9", "0.4 to 0.6", "0.1 to 0.3", "0"]
    counts = ["3 samples, 2 different", *["3 samples"] * 3, "2 samples, 1 different"]
    assert links == [
        (f"reward-{i}", label, count[0])
        for i, (label, count) in enumerate(zip(labels, counts, strict=True), 1)
    ]
    groups = re.findall(r"<details( open)?><summary>reward (.*?) <small>(.*?)</small>", page)
    assert [group[1:] for group in groups] == [*zip(labels, counts, strict=True)]
    assert [bool(is_open) for is_open, *_ in groups] == [True, *[False] * 3, True]
    assert all(f'<div class=samples id="{name}">' in page for name, *_ in links)
    assert (
        "reward 1.1</b>" in page
        and "said 5/11. 0.5 · advantage +0.25 · 11 tokens · truncated" in page
    )
    assert "reward by component" in page and "accuracy, held-out problems" in page
    assert "<td>4</td><td>0.5 (0.375 .. 0.625)</td>" in page and "low</th>" not in page


def test_rewards_that_look_equal_keep_their_samples(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    lines = [sample(0, f"text {i}") | {"reward": 0.5 + i * 1e-7} for i in range(3)]
    (run / "rollouts" / "step_000005.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert re.findall(r"<pre>text (\d)</pre>", write_report(run).read_text()) == ["2", "1", "0"]


def test_few_rewards_are_a_group_each(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    lines = [sample(0, f"text {i}") | {"reward": float(i % 5 == 0)} for i in range(30)]
    lines += lines[:5] * 2 + lines[5:6]  # two more of each of five, and one
    (run / "rollouts" / "step_000005.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = write_report(run).read_text()
    summaries = re.findall(r"<summary>reward (.*?) <small>(.*?)</small>", page)
    assert summaries == [
        ("1", "9 samples, 6 different"),
        ("0", "32 samples, 24 different, 8 shown"),
    ]
    assert len(re.findall(r"<pre>text \d+</pre>", page)) == 6 + 8


def test_sampled_text_stays_text(tmp_path: Path) -> None:
    harmless = Page(write_report(write_run(tmp_path / "a", text=MARK)).read_text())
    hostile_run = write_run(
        tmp_path / "b", text=HOSTILE, config=f"task: {json.dumps({'name': HOSTILE})}\n"
    )
    source = write_report(hostile_run).read_text()
    hostile = Page(source)
    assert hostile.tags == harmless.tags, "no element comes from a response"
    assert [name for name, _ in hostile.attributes] == [name for name, _ in harmless.attributes]
    assert "script" not in hostile.tags and not any(
        name.startswith("on") for name, _ in hostile.attributes
    )
    assert "".join(hostile.text).count("<script>alert(1)</script>") >= 3 * 12
    assert not {"\x00", "\u2028"} & set("".join(hostile.text)), "shown as \\x00 and \\u2028"
    other = write_run(tmp_path / "c", text=HOSTILE)
    compared = Page(write_comparison([hostile_run, other]).read_text())
    assert "script" not in compared.tags and "iframe" not in compared.tags


def test_a_long_curve_is_thinned_and_keeps_its_extremes() -> None:
    values = [float(step % 7) for step in range(100_001)]
    values[4321], values[77_777], values[-1] = 1e6, -1e6, 50.0
    drawn = svg(Panel("title", [Curve("label", list(enumerate(values)))]))
    assert len(drawn) < 100_000
    (path,) = re.findall(r'<path d="([^"]*)"[^>]*stroke-opacity: 0.25', drawn)
    heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)]
    assert max(heights) - min(heights) > 100, "from -1e6 to 1e6"


def test_a_page_of_a_long_run_is_small_and_fast(tmp_path: Path) -> None:
    row = {"loss": 0.5, "grad_norm": 1.0, "reward/mean": 0.1}
    lines = (json.dumps({"step": step, **row, "entropy": step % 5}) for step in range(100_000))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    began = time.process_time()
    page = write_report(tmp_path)
    assert time.process_time() - began < 5
    assert page.stat().st_size < 500_000
    assert "<p>100000 steps, 5000 of them drawn</p>" in page.read_text()
    assert "<td>step</td><td>19</td><td>99999</td>" in page.read_text(), "the last is there"


def test_a_page_has_at_most_20_mb(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", config="#" * 30_000_000)
    long = [sample(i, f"{i}" + '"' * 300_000) for i in range(48)]
    (run / "rollouts" / "step_000005.jsonl").write_text("\n".join(map(json.dumps, long)))
    page = write_report(run).read_text()
    assert 5_000_000 < len(page) <= 20_000_000 and "[280001 characters are left out]" in page

    wide = {f"{i}" + '"' * 20_000: 0.5 for i in range(30)}  # 36 MB of names in 12 samples
    wide_lines = [json.dumps(sample(i, f"{i}") | {"rewards": wide}) for i in range(12)]
    (run / "rollouts" / "step_000005.jsonl").write_text("\n".join(wide_lines))
    page = write_report(run).read_text()
    assert len(page) < 2_000_000 and "Samples of step" not in page and "<svg" in page
    assert "as this page would exceed 20 MB: samples</p>" in page


def test_no_curve_of_a_term_that_the_run_does_not_have() -> None:
    rows = [{"step": step, "loss": 0.0, "kl/rollout": 1e-12, "kl/ref": None} for step in range(9)]
    titles = [panel.title for panel in run_panels(rows, [])]
    assert "KL divergence" not in titles and "reward and accuracy" in titles
    assert "KL from the engine" not in [p.title for p in compared_panels({"a": (rows, [])})]
    rows[3]["kl/ref"] = 1e-3
    (panel,) = [panel for panel in run_panels(rows, []) if panel.title == "KL divergence"]
    assert [curve.label for curve in panel.curves] == ["from the reference"]


def test_the_step_axis_is_named_under_each_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))
    )
    panels = [Panel(f"{i}", [Curve("x", [(0, 1.0), (1, 2.0)])]) for i in range(1 + 5)]
    draw_png(panels, "title", tmp_path / "report.png")
    named = [axes.get_title(loc="left") for axes in figures[0].axes if axes.get_xlabel() == "step"]
    assert named == ["3", "4", "5"], "two full columns, and the third that ends above them"


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    config = Path(__file__).parents[3] / "configs" / "tiny_dense.yaml"
    _, figures = plan_weights(load_config(config))
    (run / "weights_plan.json").write_text(json.dumps(figures))
    source = write_report(run).read_text()
    page = Page(source)
    loads = [
        value
        for name, value in page.attributes
        if name in ("src", "href", "xlink:href", "srcset", "data")
    ]
    images = [value for value in loads if value and value.startswith("data:image/png;base64,")]
    assert all(value and value.startswith("#") for value in loads if value not in images), loads
    assert len(images) == 2 and "; img-src data:" in source, "the colours of the weight sync"
    assert not re.search(r"url\((?!#)|@import", source)
    assert "default-src 'none'" in source


def test_dark_light_and_narrow(tmp_path: Path) -> None:
    source = write_report(write_run(tmp_path / "a")).read_text()
    assert "prefers-color-scheme:dark" in source and "width=device-width" in source
    assert "svg,.legend i{filter:invert(1)" in source, "pictures follow the page"
    figures = "".join(re.findall(r"<svg.*?</svg>", source, re.DOTALL))
    assert line_styles("a")["a"]["color"] in figures
    assert 'style="fill: #ffffff"' not in figures, "they are transparent"


def test_a_comparison_of_two_runs(tmp_path: Path) -> None:
    first = write_run(
        tmp_path / "first",
        config="run: {name: first}\ntrain: {lr: 1.0e-6, steps: 4}\nkl: {coef: 0.1}\n",
    )
    second = write_run(
        tmp_path / "second", steps=3, config="run: {name: second}\ntrain: {lr: 2.0e-6, steps: 4}\n"
    )
    file = write_comparison([first, second])
    assert file == tmp_path / "compare.html"
    source = file.read_text()
    for title in (
        "reward",
        "accuracy, held-out problems",
        "KL from the reference",
        "seconds per step",
    ):
        assert f"{title}</text>" in source
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", source)
    assert rows == [("train.lr", "1e-06", "2e-06"), ("kl.coef", "0.1", "-")]
    colours = re.findall(r"border-color:(.*?)'></i>(\w+) <small>(\d) steps", source)
    first_colour, second_colour = (style["color"] for style in line_styles("ab").values())
    assert colours == [(first_colour, "first", "6"), (second_colour, "second", "3")]
    reward = next(
        text for text in re.findall(r"<svg.*?</svg>", source, re.DOTALL) if ">reward</text>" in text
    )
    assert {first_colour, second_colour} <= set(re.findall(r"stroke: (#\w+)", reward))


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "same") for folder in "ab"]
    assert f"{tmp_path}/b/same" in write_comparison(runs).read_text()


def test_a_comparison_needs_two_runs_with_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    for folders in ([run], [run, run]):
        with pytest.raises(ValueError, match="pass at least two runs, each once"):
            write_comparison(folders)
    with pytest.raises(FileNotFoundError, match="no finished step"):
        write_comparison([run, tmp_path / "b"])


def test_evaluation_sets_have_a_panel_and_are_compared() -> None:
    means = dict.fromkeys(("reward/mean", "reward/x/mean", "reward/y/mean"), 0.1)
    means |= dict.fromkeys(("reward/sampled/mean", "reward/sampled/x/mean"), 0.1)
    rows = [{"step": step, **means} for step in range(4)]
    interval = {
        "aime/mean@4": 0.1,
        "aime/mean@4/low": 0.0,
        "aime/mean@4/high": 0.2,
        "aime/size": 30,
    }
    evaluations = [{"step": step, "accuracy": 0.5, **interval} for step in (0, 4)]
    panels = {
        panel.title: [curve.label for curve in panel.curves]
        for panel in run_panels(rows, evaluations)
    }
    assert panels["held-out sets"] == ["aime/mean@4"]
    assert panels["reward by component, unweighted"] == ["x", "y"]
    assert "held-out sets" not in [
        panel.title for panel in run_panels(rows, [{"step": 0, "accuracy": 0.5}])
    ]
    compared = compared_panels({"one": (rows, evaluations), "two": (rows, [])})
    assert [
        [(c.label, len(c.points)) for c in panel.curves]
        for panel in compared
        if panel.title == "aime/mean@4"
    ] == [[("one", 2), ("two", 0)]]


def test_a_run_has_the_same_line_in_every_panel() -> None:
    names = [f"run {number}" for number in range(9)]
    rows = [{"step": step, "loss": 1.0} for step in range(24)]  # with a running mean
    runs = {name: (rows, []) for name in names} | {"run 0": ([{"step": 0}], [])}
    (panel,) = compared_panels(runs)
    styles = line_styles(names)
    assert [styles[name]["linestyle"] for name in names] == ["-"] * 8 + ["--"]
    assert styles["run 0"]["color"] == styles["run 8"]["color"]
    strokes = set(re.findall(r"stroke: (#\w+)", svg(panel)))
    assert {styles[name]["color"] for name in names} <= strokes
    alone = svg(compared_panels({name: runs[name] for name in names[:2]})[0])
    assert styles["run 1"]["color"] in alone
    assert styles["run 0"]["color"] not in alone, "the colour of a run without points"
