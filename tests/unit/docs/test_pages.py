"""Pages name only what exists, and what exists has a text: keys, metrics, exit codes, presets, messages."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from megarl.commands import explain
from megarl.config.presets import PRESETS
from megarl.config.reference import keys
from megarl.processes import exit_codes
from scripts.docs import generated
from scripts.docs.blocks import blocks, plain
from scripts.docs.check import FILES, HISTORY, problems

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
# files and folders of megarl that make metrics
MAKERS = [
    "telemetry/metrics.py",
    "telemetry/log.py",
    "telemetry/gpus.py",
    "trainer",
    "algorithms",
    "parity/gate.py",
    "stages",
    "rollout",
    "run",
    "rewards",
]
# strings with a slash that are none; the last two are state of the stream of prompts
NOT_METRICS = re.compile(
    r"/proc|/dev|/v1|https?:|^(filtered|dropped|megarl|application)/|^groups/(asked|kept)$|/chat|^\.|\.[a-z]+$|\s|/low$|/high$|^/|\\"
)
RESULT = re.compile(r"[a-z_]+(/[a-zA-Z_{}]+)+")  # of a string that looks like a metric


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_page_names_only_what_exists(file: Path) -> None:
    if file.name not in HISTORY:
        assert [*problems(file.read_text(encoding="utf-8"), file.parent)] == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("`train.stepz`", "no key train.stepz"),
        ("`model.create.famly=qwen3`", "no key model.create.famly"),
        ("`reward/men`", "no metric reward/men"),
        ("`time/{step,generat}`", "no metric time/generat"),
        ("`megarl trian CONFIG`", "no command megarl trian"),
        ("`megarl train CONFIG --dry`", "megarl train has no option --dry"),
        ("`--resume-change`", "no option --resume-change"),
        ("`configs/tiny_dence.yaml`", "no path configs/tiny_dence.yaml"),
        ("`megarl.config.shcema`", "no module or name megarl.config.shcema"),
        ("ends with exit code 4", "no exit code 4"),
        ("[it](nowhere.md)", "the link nowhere.md leads nowhere"),
        ("[it](status.md#nothing-of-the-kind)", "no heading #nothing-of-the-kind"),
        ("```bash {.run}\nmegarl train c.yaml trian.lr=1\n```", "no key trian.lr"),
        ("```bash {.run}\nscripts/quick.sh\n```", "no path scripts/quick.sh"),
        ("```bash\nls\n```", "a block of bash needs one of .run"),
        ("```bash {.norun}\nls\n```", "needs a reason"),
        ("```yaml {.rum}\na: 1\n```", "unknown class .rum"),
    ],
)
def test_a_wrong_name_is_found(page: str, problem: str) -> None:
    (found,) = problems(page, DOCS)
    assert problem in found


@pytest.mark.parametrize(
    "page",
    [
        "`train.lr`, `rewards.0.weight`, `rollout.engine_options.max_num_seqs`, `reward/NAME/mean`, `memory/{update,sync}/peak_gb`",
        "`megarl check CONFIG --layouts 1 tp2`, `configs/*.yaml`, `runs/my/hf`, `docs/install.md`, `megarl.algorithms.kl`, exit code 143",
        "| megarl | verl |\n|---|---|\n| `train.lr` | `train.learning_rate` |",
    ],
)
def test_a_right_name_is_none(page: str) -> None:
    assert [*problems(page, DOCS)] == []


def test_every_key_has_a_text() -> None:
    assert len([*keys()]) > 200
    assert [key.name for key in keys() if not key.text] == []


def test_every_preset_has_a_text() -> None:
    assert [name for name in PRESETS if not generated.preset_texts().get(name)] == []


def test_every_exit_code_has_a_text() -> None:
    codes = {
        value for name, value in vars(exit_codes).items() if name.isupper() and type(value) is int
    }
    assert codes == {*generated.exit_code_texts()} and all(generated.exit_code_texts().values())


def test_every_metric_has_a_text() -> None:
    assert [
        text for texts in generated.metric_texts().values() for text in texts.values() if not text
    ] == []
    made = set[str]()
    for maker in MAKERS:
        path = ROOT / "megarl" / maker
        for file in [path] if path.is_file() else path.rglob("*.py"):
            made |= metrics_in(file.read_text(encoding="utf-8"))
    # these have names without a slash, too
    made |= keys_in((ROOT / "megarl/telemetry/metrics.py").read_text(encoding="utf-8"))
    assert len(made) > 60 and "grad_norm" in made
    assert sorted(name for name in made if not is_described(name)) == []


def metrics_in(source: str) -> set[str]:
    """Returns the strings of a module that look like metrics; a name stands for a value in them."""
    tree = ast.parse(source)
    texts = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in texts or id(node) in inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else "NAME" for part in node.values
            ]
            names.add("".join(parts))
    return {name for name in names if RESULT.fullmatch(name) and not NOT_METRICS.search(name)}


def keys_in(source: str) -> set[str]:
    """Returns the keys of all dicts that a module writes out."""
    found = [node.keys for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)]
    texts = [key.value for key in chain.from_iterable(found) if isinstance(key, ast.Constant)]
    return {text for text in texts if isinstance(text, str)}


def is_described(name: str) -> bool:
    """Returns True if a metric has a text; a part in capitals, on either side, stands for any name."""
    described = [metric for texts in generated.metric_texts().values() for metric in texts]
    return any(
        len(name.split("/")) == len(metric.split("/"))
        and all(
            left == right or left == "NAME" or right.isupper()
            for left, right in zip(name.split("/"), metric.split("/"), strict=True)
        )
        for metric in described
    )


def test_a_metric_without_a_text_is_found() -> None:
    source = 'def f(name):\n    return {"perf/furlongs": 1, f"memory/{name}/peek": 2, "loss": 3}\n'
    assert sorted(name for name in metrics_in(source) if not is_described(name)) == [
        "memory/NAME/peek",
        "perf/furlongs",
    ]


def test_every_message_of_exit_code_2_has_an_anchor() -> None:
    messages = generated.config_messages()
    anchors = [message.anchor for message in messages]
    assert len(messages) > 140 and len({*anchors}) == len(anchors)
    # one that `refuse` builds, one with a prefix, one in several lines
    for part in ("sft.patience=", "lora.sync=adapter: lora.rank=", "makes every advantage zero"):
        assert any(part in message.text for message in messages), part
    page = (DOCS / "guides/troubleshooting.md").read_text(encoding="utf-8")
    assert "<!-- generated: config messages -->" in page
    section = generated.messages()
    assert all(f"{{ #{name} }}" in section for name in anchors)


def test_explain_prints_type_default_text_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    for key, parts in {
        "rollout.sleep_level": [
            "0, 1 or 2; default 0",
            "frees the KV cache",
            "exit code 2 for settings that the split topology",
        ],
        "rewards.0.name": ["text; required", "dotted path of a function"],
        "algorithm.clip_high": [
            "number at least 0 or null",
            "preset dapo: 0.28",
        ],
        "sft": [
            "sft: section Settings of",
            "Only for stage: sft.",
            "sft.patience: Number of evaluations",
        ],
        "": ["train: Steps, optimizer"],
    }.items():
        explain.run(explain_args(key))
        text = " ".join(capsys.readouterr().out.split())
        assert all(part in text for part in parts), text
    for key, near in {
        "lr": "train.lr",
        "rollout.sleep_levle": "did you mean sleep_level",
        "foo": "known keys here: stage, run",
    }.items():
        with pytest.raises(ValueError, match=f"unknown key {key} in the config; .*{near}"):
            explain.run(explain_args(key))


def explain_args(key: str) -> object:
    return type("Args", (), {"key": key})


def test_blocks_have_classes_and_files() -> None:
    page = "a\n\n- b\n\n  ```yaml {.run file=my.yaml}\n  x: 1\n  ```\n\n````text {.output}\n```\n````\n"
    config, output = blocks(page)
    assert (config.kind, config.text, config.attributes) == ("run", "x: 1\n", {"file": "my.yaml"})
    assert (output.kind, output.text) == ("output", "```\n")
    assert plain(page) == page.replace("yaml {.run file=my.yaml}", 'yaml title="my.yaml"').replace(
        "text {.output}", "text"
    )


@pytest.mark.skipif(not importlib.util.find_spec("material"), reason="needs the extra docs")
def test_the_site_builds_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for file in site.rglob("*.html"):
        for tag in re.findall(
            r"<(?:link|script|img|iframe)\b[^>]*>", file.read_text(encoding="utf-8")
        ):
            assert not re.search(r"""(?:href|src)=["']?(?:https?:)?//""", tag), (
                f"{file.name}: {tag}"
            )
    for name in ("rollout.sleep_level", "algorithm.kl.coef"):
        assert f'id="{name}"' in (site / "reference/config.html").read_text(encoding="utf-8")
    assert (site / "search/search_index.json").is_file()
