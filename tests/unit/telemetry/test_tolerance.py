"""Files of a run that were cut, mixed up or filled by a model: readers leave out what they cannot use, and say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import SampleFiles
from megarl.telemetry.curves import Curve, Panel, draw_png, run_panels, svg
from megarl.telemetry.metrics import append_line, forget_steps, iterate_jsonl, read_metrics
from megarl.telemetry.report import PLAN, write_comparison, write_report
from megarl.telemetry.sample_files import SampleWriter, sample_files

GOOD = [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}]
DEEP = b'{"step": 1, "loss": ' + b"[" * 100_000

BAD_LINES = {  # of metrics.jsonl and eval.jsonl: bytes of the line
    "cut": b'{"step": 3, "lo',
    "NULs": b"\0" * 500,
    "an array": b"[1, 2]",
    "a number": b"7",
    "text": b'"step"',
    "null": b"null",
    "no JSON": b"<script>alert(1)</script>",
    "deep": DEEP,
    "5,000 digits": b'{"step": 1, "loss": ' + b"1" * 5000 + b"}",
    "step is text": b'{"step": "1"}',
    "step is null": b'{"step": null}',
    "step is true": b'{"step": true}',
    "step is a fraction": b'{"step": 1.5}',
    "step is a list": b'{"step": [1]}',
    "step is negative": b'{"step": -1}',
    "step is too large": b'{"step": 1' + b"0" * 30 + b"}",
    "no step": b'{"loss": 1.0}',
    "bad UTF-8 outside of text": b'{"step": 1, \xff\xfe}',
    "U+FEFF": b'\xef\xbb\xbf{"step": 1}',
}
ODD_LINES = {  # lines that can be read, and what becomes of them
    "bad UTF-8": (
        b'{"step": 2, "layout": "a\xff\xed\xa0\x80b"}',
        {"layout": "a\ufffd\ufffd\ufffd\ufffdb"},
    ),
    "U+2028": (
        '{"step": 2, "layout": "a\u2028\u2029\x85b"}'.encode(),
        {"layout": "a\u2028\u2029\x85b"},
    ),
    "lone surrogate": (b'{"step": 2, "layout": "\\ud800"}', {"layout": "\ud800"}),
    "carriage return": (b'{"step": 2, "loss": 1}\r', {"loss": 1}),
    "NaN": (
        b'{"step": 2, "loss": NaN, "a": Infinity, "b": -Infinity}',
        {"loss": None, "a": None, "b": None},
    ),
    "1e400 and 10**400": (
        b'{"step": 2, "a": 1e400, "b": 1' + b"0" * 400 + b"}",
        {"a": None, "b": None},
    ),
    "1e308": (b'{"step": 2, "loss": 1e308}', {"loss": 1e308}),
    "true": (b'{"step": 2, "loss": true}', {"loss": True}),
    "a key twice": (b'{"step": 1, "step": 2}', {}),
}


def write_lines(file: Path, *lines: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\n".join(lines))
    return file


def good(row: int) -> bytes:
    return json.dumps(GOOD[row]).encode()


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_left_out_and_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    file = write_lines(
        tmp_path / "metrics.jsonl", good(0), BAD_LINES[name], b"", good(1), BAD_LINES[name]
    )
    assert read_metrics(file) == GOOD
    warning = (
        f"megarl: warning: {file}: 2 lines are left out, line 2 first: not JSON objects with step\n"
    )
    assert capfd.readouterr().err == warning


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_run_resumes_behind_a_bad_line(tmp_path: Path, name: str) -> None:
    file = write_lines(
        tmp_path / "metrics.jsonl", good(0), BAD_LINES[name], good(1), BAD_LINES[name][:40]
    )
    forget_steps(file, 1)
    append_line(file, {"step": 1, "loss": 9.0})
    assert file.read_text() == '{"step": 0, "loss": 1.0}\n{"step": 1, "loss": 9.0}\n'
    evaluated = write_lines(
        tmp_path / "eval.jsonl", good(0), BAD_LINES[name], good(1), BAD_LINES[name][:40]
    )
    forget_steps(evaluated, 1)
    assert evaluated.read_text() == '{"step": 0, "loss": 1.0}\n'
    forget_steps(evaluated, 0)
    assert evaluated.read_text() == ""


@pytest.mark.parametrize("name", ODD_LINES)
def test_an_odd_line_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    line, values = ODD_LINES[name]
    file = write_lines(tmp_path / "metrics.jsonl", good(0), line, good(1))
    assert read_metrics(file) == [GOOD[0], {"step": 2, **values}, GOOD[1]]
    forget_steps(file, 9)
    assert read_metrics(file) == [GOOD[0], {"step": 2, **values}, GOOD[1]]
    assert not capfd.readouterr().err


def test_a_kill_while_a_resumed_run_forgets_steps_loses_nothing(
    tmp_path: Path, monkeypatch
) -> None:
    file = write_lines(tmp_path / "eval.jsonl", good(0), good(1))
    before = file.read_bytes()

    def killed(*paths: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        forget_steps(file, 1)
    assert file.read_bytes() == before


def sample(**values: Any) -> bytes:
    common = {
        "prompt": "asked",
        "response": "SAID",
        "answer": "4",
        "reward": 0.5,
        "rewards": {"accuracy": 1.0},
    }
    return json.dumps(
        common | {"length": 3, "finish": "stop", "truncated": False} | values, ensure_ascii=False
    ).encode(errors="surrogatepass")


BAD_SAMPLES = {
    "cut": sample()[:40],
    "an array": b"[]",
    "no prompt": b'{"response": "a"}',
    "no response": b'{"prompt": "a"}',
    "prompt is a list": sample(prompt=[{"role": "user", "content": "a"}]),
    "response is null": sample(response=None),
    "NULs": b"\0" * 99,
    "deep": DEEP,
}
ODD_SAMPLES = {  # and what the page shows
    "U+2028": (sample(response="SAID\u2028\u2029\x85\x0b\x0c!"), r"SAID\u2028\u2029\x85\x0b\x0c!"),
    "lone surrogate": (sample(response="SAID").replace(b"SAID", b"SAID\\ud800!"), r"SAID\ud800!"),
    "bad UTF-8": (sample().replace(b"SAID", b"SAID\xff!"), "SAID\ufffd!"),
    "surrogate as bytes": (sample(response="SAID\ud800!"), "SAID\ufffd\ufffd\ufffd!"),
    "control characters": (sample(response="SAID\0\x1b[31m\x07!"), r"SAID\x00\x1b[31m\x07!"),
    "right to left": (sample(response="SAID\u202e\uffff" + "\u0301" * 99), r"SAID\u202e\uffff"),
    "reward is markup": (
        sample(reward="<script>1</script>"),
        "<b>reward &lt;script&gt;1&lt;/script&gt;</b>",
    ),
    "reward is a list": (sample(reward=[1]), "<b>reward </b>"),
    "rewards is a list": (sample(rewards=[1]), "<small>3 tokens"),
    "rewards holds markup": (sample(rewards={"<b>": "<i>"}), "&lt;b&gt; &lt;i&gt;"),
    "advantage is text": (sample(advantage="<b>"), "3 tokens"),
    "length is markup": (sample(length="<b>"), "&lt;b&gt; tokens"),
    "finish is a list": (sample(finish=["<b>"]), "3 tokens · <"),
    "answer is markup": (sample(answer="<b>"), "answer: &lt;b&gt;"),
    "NaN": (sample(reward=float("nan"), advantage=float("inf")), "<b>reward </b>"),
    "2 MB": (
        sample(response="SAID" + "x" * 2_000_000),
        f"SAID{'x' * 9_996}\n[1980004 characters are left out]\n{'x' * 10_000}<",
    ),
}


@pytest.fixture
def sections(tmp_path: Path, monkeypatch):
    """The page of a run with these sample lines in its last file; the curves, which take seconds, are left out."""
    monkeypatch.setattr("megarl.telemetry.report.svg", lambda panel: "")
    monkeypatch.setattr(
        "megarl.telemetry.report.draw_png", lambda panels, title, file: file.touch()
    )
    write_lines(tmp_path / "metrics.jsonl", *map(good, range(2)))

    def read(*lines: bytes) -> str:
        write_lines(tmp_path / "rollouts/step_000001.jsonl", *lines)
        return write_report(tmp_path).read_bytes().decode()

    return read


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_is_left_out(sections, capfd: pytest.CaptureFixture[str], name: str) -> None:
    page = sections(sample(), BAD_SAMPLES[name])
    assert page.count("<article>") == page.count("SAID") == 1
    assert (
        "1 line is left out, line 2 first: not JSON objects with prompt, response"
        in capfd.readouterr().err
    )
    assert "<article>" not in sections(BAD_SAMPLES[name]), "nothing to show is no failure either"


@pytest.mark.parametrize("name", ODD_SAMPLES)
def test_an_odd_sample_is_shown(sections, name: str) -> None:
    line, shown = ODD_SAMPLES[name]
    page = sections(line, sample(response="other"))
    assert page.count("<article>") == 2
    assert shown in page
    assert "<script" not in page and "<i>" not in page


STRAY = (
    "step_evil.jsonl",
    "step_.jsonl",
    "step_1.jsonl",
    "step_-00001.jsonl",
    "step_٠٠٠٠٠٩.jsonl",
    "step_000009.jsonl~",
)


def test_stray_files_are_ignored_and_kept(sections, tmp_path: Path) -> None:
    for name in STRAY:
        write_lines(tmp_path / "rollouts" / name, b"evil")
    (tmp_path / "rollouts/step_000008.jsonl").mkdir()
    assert "Samples of step 1<" in sections(sample())
    assert list(sample_files(tmp_path / "rollouts")) == [1]
    SampleWriter(tmp_path / "rollouts", SampleFiles(), seed=0, start=0)
    assert sorted(file.name for file in (tmp_path / "rollouts").iterdir()) == sorted(
        (*STRAY, "step_000008.jsonl")
    )


@pytest.mark.parametrize(
    "plan",
    [
        b"{}",
        b"[]",
        b"null",
        b'{"bytes',
        b"\xff",
        b'{"bytes_between": []}',
        b'{"bytes_between": [[NaN]]}',
        DEEP,
    ],
)
def test_a_plan_that_cannot_be_drawn_is_left_out(
    sections, tmp_path: Path, capfd, plan: bytes
) -> None:
    (tmp_path / PLAN).write_bytes(plan)
    assert "Weight sync" not in sections(sample())
    assert f"{PLAN} cannot be read and is left out" in capfd.readouterr().err


BOMB = b"a: &a [1]\n" + b"".join(
    b"%c: &%c [*%c, *%c, *%c]\n" % (c + 1, c + 1, c, c, c) for c in range(97, 121)
)


@pytest.mark.parametrize(
    "config",
    [b"\xff", b"a: [", b"- 1", b"null", b"a: &a {b: *a}", BOMB, b"{" * 1000, b"!!python/x 1"],
)
def test_a_config_that_cannot_be_read_is_left_out_of_comparisons(
    sections, tmp_path: Path, capfd, config: bytes
) -> None:
    other = tmp_path / "other"
    write_lines(other / "metrics.jsonl", good(0))
    (other / "config.yaml").write_text("train: {lr: 1.0}\n")
    (tmp_path / "config.yaml").write_bytes(config)
    sections(sample())
    page = write_comparison([tmp_path, other]).read_text()
    assert "<tr><td>train.lr</td><td>-</td><td>1.0</td></tr>" in page
    assert "config.yaml cannot be read and is left out" in capfd.readouterr().err


VALUES = {
    "1e308": [1.0, 1e308, -1e308, 2.0],
    "only 1e308": [1e308, -1.7e308],
    "1e100": [1.0, 9.9e99, -9.9e99],
    "tiny": [5e-324, 1e-300, 1.0],
    "zero": [0.0, -0.0],
    "many": [1e308, *range(40)],
    "integers": [10**300, 1, 2],
}
TEXTS = [
    "$x^{$",
    r"\$\frac{",
    "$$",
    "a\0\x1b\u202e\uffffb",
    "\ud800",
    "<script>",
    "x" * 5000,
    "\n\n",
    "%s{0}",
]


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_any_finite_number_is_drawn_or_left_out(name: str, is_log: bool) -> None:
    curve = Curve("label", list(enumerate(VALUES[name])))
    assert svg(Panel("title", [curve], is_log)).startswith("<svg")


def test_far_steps_are_drawn() -> None:
    curve = Curve("label", [(0, 1.0), (2**53 - 1, 2.0)])
    assert svg(Panel("title", [curve])).startswith("<svg")


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_is_drawn(tmp_path: Path, text: str) -> None:
    panel = Panel(text, [Curve(text, [(0, 1.0), (1, 2.0)]), Curve("b", [(0, 1e308)])])
    assert "<script" not in svg(panel)
    draw_png([panel], text, tmp_path / "a.png")


def test_a_report_of_all_of_it_at_once(tmp_path: Path) -> None:
    odd = [line for line, _ in ODD_LINES.values()]
    hostile = json.dumps(
        {"step": 3, "layout": TEXTS[0], **{f"reward/{text}/mean": 1e308 for text in TEXTS}}
    ).encode()
    for name in ("metrics.jsonl", "eval.jsonl"):
        write_lines(tmp_path / name, *BAD_LINES.values(), *odd, hostile)
    write_lines(
        tmp_path / "rollouts/step_000003.jsonl",
        *BAD_SAMPLES.values(),
        *(line for line, _ in ODD_SAMPLES.values()),
    )
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\0<script>")
    (tmp_path / PLAN).write_text("{}")
    page = write_report(tmp_path).read_bytes()
    # one of the texts has two rewards, and is shown with both
    assert b"<script" not in page and page.count(b"<article>") == 9
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == len(odd) + 1


def test_the_types_of_a_line(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "a.jsonl", b'{"a": 1, "b": "x"}', b'{"a": 1.0, "b": "x"}', b'{"a": 1}'
    )
    assert list(iterate_jsonl(file, a=int, b=str)) == [{"a": 1, "b": "x"}]
    for nothing in (tmp_path / "missing", tmp_path):
        assert list(iterate_jsonl(nothing, a=int)) == []
    assert run_panels(read_metrics(file), [])[0].curves == []
