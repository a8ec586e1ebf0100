"""`hf:` tasks, from files and from a local hub: rows, what is held out, and one line for each mistake."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_rows import read_all

from megarl.commands.preflight import preflight
from megarl.config.load import parse_config
from megarl.config.schema import Eval, Task
from megarl.data.tasks import Problem, check_tasks, load_sources, load_task
from megarl.platform import env as packages
from megarl.platform.env import Env
from tests.hub import Hub, Repo, serve_hub

datasets = pytest.importorskip("datasets", reason="datasets is in the dev extra")
pyarrow = pytest.importorskip("pyarrow.parquet") and sys.modules["pyarrow"]
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def sums(count: int, start: int = 0) -> Rows:
    return [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(start, start + count)]


def write(file: Path, rows: Rows) -> str:
    """Writes the rows in the format of the file's suffix; returns the task's name."""
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_bytes(jsonl(rows))
    return f"hf:{file}"


def task(name: str, **options: Any) -> Task:
    return Task(name=name, options=options)


def problems(a_task: Task, split: Any = "train", **more: Any) -> list[Problem]:
    source = load_task(a_task, split, **more)
    return [source.problem(index) for index in range(source.size or 0)]


# --- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns(tmp_path: Path, suffix: str) -> None:
    chat = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 1", "name": "Ada"},
    ]
    rows = [
        {
            "question": "1 + 1",
            "answer": 2,
            "level": "easy",
            "chat": chat,
            "reward_model": {"ground_truth": "two"},
        },
        {
            "question": "2 + 2",
            "answer": 4,
            "level": "hard",
            "chat": chat[1:],
            "reward_model": {"ground_truth": "4"},
        },
    ]
    name = write(tmp_path / f"rows{suffix}", rows)
    first, second = problems(task(name, held_out=0))
    assert (first.question, first.answer) == ("1 + 1", "2")
    assert first.extra == {key: rows[0][key] for key in ("level", "reward_model")} | {
        "chat": first.extra["chat"]
    }
    assert second.extra["level"] == "hard"
    first, second = problems(
        task(name, held_out=0, prompt="chat", answer="reward_model.ground_truth")
    )
    assert (first.question, first.answer) == (tuple(chat), "two"), (
        "and no key that only other messages have"
    )
    assert first.extra["question"] == "1 + 1"
    (first, _) = problems(task(name, held_out=0, prompt=["level", "question"]))
    assert first.question == "easy\n\n1 + 1"


def test_the_answer_of_gsm8k_is_behind_its_solution(tmp_path: Path) -> None:
    name = write(
        tmp_path / "gsm8k.jsonl",
        [{"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42 "}] * 2,
    )
    assert problems(task(name, held_out=0, answer_pattern="#### (.+)"))[0].answer == "42"


def test_a_scan_reads_what_the_problems_have(tmp_path: Path) -> None:
    rows = [
        row | {"responses": [[{"role": "assistant", "content": answer}] for answer in "yn"]}
        for row in sums(2500)
    ]
    source = load_task(task(write(tmp_path / "rows.parquet", rows), held_out=0.1))
    problems = [source.problem(index) for index in range(source.size or 0)]
    scanned = list(source.problems())
    assert scanned == problems and [problem.where for problem in scanned] == [
        problem.where for problem in problems
    ]


# --- held-out problems --------------------------------------------------------------------------------------------


def questions(found: list[Problem]) -> set[Any]:
    return {problem.question for problem in found}


def test_a_part_is_held_out_whatever_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = sums(1000)
    name = write(tmp_path / "rows.jsonl", rows + rows[:50])
    train, held_out = problems(task(name)), problems(task(name), "eval")
    assert not questions(train) & questions(held_out), "not even of rows that occur twice"
    assert len(train) + len(held_out) == 1050 and 30 < len(questions(held_out)) < 70
    turned = task(write(tmp_path / "turned.parquet", rows[::-1]))
    assert questions(problems(turned, "eval")) == questions(held_out)
    assert len(problems(task(name, held_out=0))) == 1050
    with pytest.raises(
        ValueError,
        match=re.escape("task.options.held_out=0; raise it, or set task.options.eval_split"),
    ):
        load_task(task(name, held_out=0), "eval")


def test_problems_of_the_evaluation_split_are_not_trained_on(tmp_path: Path) -> None:
    write(
        tmp_path / "data" / "train.jsonl", [*sums(9), {"question": " 20 +  1 =\n", "answer": "21"}]
    )
    write(tmp_path / "data" / "test.jsonl", sums(3, start=20))
    split = task(f"hf:{tmp_path}/data", eval_split="test")
    assert questions(problems(split, "eval")) == questions(
        problems(task("hf:" + str(tmp_path / "data/test.jsonl"), held_out=0))
    )
    assert [p.question for p in problems(split)] == [row["question"] for row in sums(9)]


def test_problems_of_evaluation_sets_and_other_parts_are_not_trained_on(tmp_path: Path) -> None:
    all_rows, some = (
        write(tmp_path / "all.parquet", sums(20)),
        write(tmp_path / "some.jsonl", sums(4)),
    )
    (tmp_path / "held.jsonl").write_bytes(jsonl(sums(4, start=4)))
    mixture = [
        {"name": all_rows, "options": {"held_out": 0.01}},
        {
            "name": f"jsonl:{tmp_path}/some.jsonl",
            "options": {"eval_file": str(tmp_path / "held.jsonl")},
        },
    ]
    mixed = Task.model_validate({"mixture": mixture})
    evaluated = Eval.model_validate(
        {"every": 1, "sets": [{"name": "few", "task": some, "size": 9}]}
    )
    with pytest.raises(
        ValueError,
        match=r"task.mixture\[1\]: .*some.jsonl' has no train problems, as 4 are held out",
    ):
        list(check_tasks(mixed, evaluated, held_out=False, check=read_all))
    absent = Eval.model_validate({"size": 0, "sets": [{"name": "aime", "task": "jsonl:/absent"}]})
    with pytest.raises(ValueError, match=r"eval.sets: aime: task file /absent does not exist"):
        list(check_tasks(task(all_rows), absent, held_out=True, check=read_all))
    one = task(all_rows, held_out=0)
    sets = Eval.model_validate({"size": 0, "sets": evaluated.sets})
    notes = list(check_tasks(one, sets, held_out=True, check=read_all))
    assert notes == [
        "eval.sets: few: size=9, but there are 4 problems: all are used",
        f"{all_rows}: 4 of 20 problems are held out for evaluation, and never trained on",
    ]
    first, second = load_sources(mixed)
    assert (first.size, second.size) == (16 - first.held_out + 4, 4)


# --- mistakes -----------------------------------------------------------------------------------------------------


def zero_rows() -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table({"question": pyarrow.array([], pyarrow.string())}), buffer
    )
    return buffer.getvalue()


BAD: dict[str, bytes] = {
    "good.jsonl": jsonl(sums(5)),
    "empty.jsonl": b"",
    "blank.jsonl": b"\n\n",
    "broken.jsonl": b'{"question": "a"}\n{oops\n',
    "null.jsonl": jsonl([*sums(7), {"question": None, "answer": "1"}]),
    "number.jsonl": jsonl([{"question": 5}]),
    "roles.jsonl": jsonl([{"messages": [{"from": "human", "value": "hi"}]}]),
    "text.jsonl": jsonl([{"text": "a", "label": 1}]),
    "notes.txt": b"hello",
    "zero.parquet": zero_rows(),
    "broken.parquet": b"PAR1 but no more",
}


@pytest.mark.parametrize(
    ("file", "options", "says"),
    [
        ("nope.jsonl", {}, "nope.jsonl does not exist; name a file, a folder or a hub id"),
        ("empty.jsonl", {}, "has no rows; correct its files, or task.options.split=train"),
        ("blank.jsonl", {}, "has no rows; correct its files, or task.options.split=train"),
        (
            "zero.parquet",
            {},
            "has no rows; correct its files, or task.options.split=train and config=None",
        ),
        ("broken.jsonl", {}, "broken.jsonl: line 2 is not JSON (Expecting property name"),
        ("broken.parquet", {}, "broken.parquet cannot be read (Parquet"),
        ("notes.txt", {}, "choose from .jsonl, .json, .parquet, .csv"),
        ("good.jsonl", {"split": "dev"}, "task.options.split=dev and config=None"),
        ("good.jsonl", {"split": "dev"}, "['train']"),
        ("good.jsonl", {"eval_split": "test"}, "task.options.eval_split=test"),
        (
            "good.jsonl",
            {"split": "train[:0]"},
            "has no rows; correct its files, or task.options.split=train[:0]",
        ),
        (
            "good.jsonl",
            {"prompt": "problem"},
            "task.options.prompt=problem is not a column of hf:",
        ),
        ("good.jsonl", {"answer": "a.b"}, "good.jsonl; choose from: question, answer"),
        (
            "text.jsonl",
            {},
            "line 1 needs exactly one of prompt, question, problem, messages; it has text, label",
        ),
        ("null.jsonl", {}, "null.jsonl: line 8 needs exactly one of"),
        ("number.jsonl", {}, "number.jsonl: line 1: the prompt must be text"),
        (
            "roles.jsonl",
            {},
            "roles.jsonl: line 1: the prompt: message 1 is {'from': 'human'",
        ),
        ("good.jsonl", {"prompts": "a"}, "has no option 'prompts'; did"),
        ("good.jsonl", {"prompts": "a"}, "did you mean prompt?"),
        (
            "good.jsonl",
            {"held_out": 2},
            "good.jsonl, option held_out=2 is invalid: it should be less than 1",
        ),
        (
            "good.jsonl",
            {"answer_pattern": "#### .*"},
            "has no group; put parentheses around the answer",
        ),
        (
            "good.jsonl",
            {"answer_pattern": "#### (.*)"},
            "good.jsonl: line 1: task.options.answer_pattern='#### (.*)' does not match",
        ),
        (
            "text.jsonl",
            {"prompt": "text", "answer_pattern": "(.*)"},
            "task.options.answer=answer is not a column of hf:",
        ),
        ("good.jsonl", {"revision": "main"}, "task.options.revision=main is for hub ids"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(
    tmp_path: Path, file: str, options: dict[str, Any], says: str
) -> None:
    if file in BAD:
        (tmp_path / file).write_bytes(BAD[file])
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        a_task = task(f"hf:{tmp_path}/{file}", **options)
        list(check_tasks(a_task, Eval(), held_out=False, check=read_all))
    assert says in str(error.value), error.value


def test_rows_of_an_evaluation_set_are_checked_too(tmp_path: Path) -> None:
    name = write(tmp_path / "null.parquet", [*sums(7), {"question": None, "answer": "1"}])
    sets = [{"name": "bad", "task": name}]
    listed = {"name": "megarl.data.tasks:random_tokens", "options": {"vocab": 67}}
    config = parse_config(
        {"model": {"create": {}}, "task": listed, "eval": {"every": 1, "size": 0, "sets": sets}}
    )
    with pytest.raises(ValueError, match="row 7 needs exactly one of"):
        preflight(config, Env())


def test_without_the_package_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    with pytest.raises(ValueError, match=re.escape("needs datasets: pip install megarl[hf]")):
        load_task(task("hf:org/data"))


# --- the hub ------------------------------------------------------------------------------------------------------

# Runs several commands in one process and prints [[exit code, stdout, stderr], ...]
PROGRAM = """
import contextlib, io, json, sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.02))  # the hub's client waits 31 s between its six tries
from megarl.cli import main
results = []
for args in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(args)
    results.append([code, out.getvalue(), err.getvalue()])
assert "torch" not in sys.modules
print(json.dumps(results))
"""
CONFIG = """
run: {dir: RUNS}
model: {create: {}}
task: {name: hf:org/sums, options: {eval_split: test}}
rollout: {max_tokens: 16}
eval: {every: 1, sets: [{name: few, task: hf:org/sums, options: {config: few}, samples: 4}]}
"""
README = b"""---
configs:
- config_name: many
  default: true
  data_files: [{split: train, path: many/train.jsonl}, {split: test, path: many/test.jsonl}]
- config_name: few
  data_files: few/*.jsonl
---
"""
FILES = {
    "README.md": README,
    "many/train.jsonl": jsonl(sums(40)),
    "many/test.jsonl": jsonl(sums(10, start=40)),
    "few/train.jsonl": jsonl(sums(3, start=90)),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    served = {
        "org/sums": Repo(FILES, revisions=("main", "v1")),
        "org/gated": Repo(FILES, is_gated=True),
        "org/private": Repo(FILES, token="secret"),
        "org/cut": Repo(FILES, breaks_off=True),
        "org/code": Repo({"README.md": b"# only a script", "code.py": b"raise SystemExit"}),
    }
    with serve_hub(datasets=served) as running:
        yield running


def dry_runs(
    hub: Hub, folder: Path, *overrides: list[str], **variables: str
) -> list[tuple[int, str, str]]:
    folder.mkdir(exist_ok=True)
    (folder / "c.yaml").write_text(CONFIG.replace("RUNS", str(folder / "runs")))
    commands = [["train", "c.yaml", "--dry-run", *more] for more in overrides]
    env = hub.env(folder / "home", **variables)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_dataset_of_the_hub_is_pinned_to_its_commit_and_read_offline(
    hub: Hub, tmp_path: Path
) -> None:
    [(code, out, err)] = dry_runs(hub, tmp_path, ["task.options.revision=v1"])
    assert code == 0, err
    commit = hub.repos["datasets"]["org/sums"].commit
    assert out.count(f"revision: {commit}") == 2, "of the task and of the evaluation set"
    assert "eval: size=256, but there are 10 problems" in err
    assert "few: size=256, but there are 3 problems" in err
    before = len(hub.requests)
    [(code_of_few, _, err_of_few)] = dry_runs(
        hub,
        tmp_path / "few",
        ["task.options={data_files: few/*.jsonl, held_out: 0.5}", "eval={size: 1, every: 1}"],
    )
    fetched = {
        path.rpartition("/")[2]
        for path in (path for _, path in hub.requests[before:])
        if "/resolve/" in path
    }
    assert code_of_few == 0, err_of_few
    assert fetched == {"train.jsonl"}
    before = len(hub.requests)
    again = dry_runs(hub, tmp_path, ["task.options.revision=v1"], HF_HUB_OFFLINE="1")
    assert again == [[code, out, err]] and len(hub.requests) == before


def test_mistakes_with_a_hub(hub: Hub, tmp_path: Path) -> None:
    cases = {
        "task.name=hf:org/nothing": f"neither local nor a dataset that {hub.base} shows you",
        "task.name=hf:org/private": "or set HF_TOKEN if it is private",
        "task.name=hf:org/gated": "is gated; accept its terms on its page on the hub, and set HF_TOKEN",
        "task.name=hf:org/cut": "cannot be downloaded (",
        "task.name=hf:org/code": "cannot be read",
        "task.name=hf:no such": "does not exist; name a file, a folder or a hub id",
        "task.options.revision=v9": "task.name=hf:org/sums has no revision v9; set task.options.revision to",
        "task.options.config=more": "['many', 'few']); correct its files, or task.options.eval_split=test and config=more",
        "task.options.split=dev": "['train', 'test'].); correct its files, or task.options.split=dev",
    }
    for (override, says), (code, out, err) in zip(
        cases.items(), dry_runs(hub, tmp_path, *([override] for override in cases)), strict=True
    ):
        *commits, last = err.splitlines()
        assert (code, out) == (2, "") and all(" is commit " in line for line in commits), (
            override,
            err,
        )
        assert says in last, (override, err)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE is set; unset it, or run `hf download --repo-type dataset org/sums`",
        ),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be used"),
    ],
)
def test_offline_and_not_cached(
    hub: Hub, tmp_path: Path, variables: dict[str, str], says: str
) -> None:
    [(code, out, err)] = dry_runs(hub, tmp_path, [], **variables)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert says in err
