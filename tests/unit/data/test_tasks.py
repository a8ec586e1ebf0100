"""Tasks: where problems come from, what is held out, and what a wrong file or name says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sample_rows import read_all

from megarl import cli
from megarl.config.schema import Eval, Task
from megarl.config.task import MixturePart
from megarl.data.conversations import example_encoder
from megarl.data.prompts import PromptStream
from megarl.data.rows import Problem, Source
from megarl.data.tasks import check_tasks, load_sources, load_task, random_tokens
from megarl.data.tokenizer import TokenIds

SUMS = Task(
    name="reasoning_gym:chain_sum",
    options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
)


def check(task: Task, *, held_out: bool = False) -> list[str]:
    return list(check_tasks(task, Eval(), held_out=held_out, check=read_all))


def write(folder: Path, *lines: str) -> Task:
    file = folder / "problems.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return Task(name=f"jsonl:{file}")


def test_reasoning_gym_is_the_same_every_time_and_scores_itself():
    first, again = load_task(SUMS).problem(3), load_task(SUMS).problem(3)
    assert (first.question, first.answer) == (again.question, again.answer)
    assert first.extra["score"](first.answer) == 1.0
    assert first.extra["score"]("no") < 0.5


def test_held_out_problems_are_never_trained_on_though_the_task_is_small():
    # two one-digit numbers: a few hundred questions, so that both streams repeat themselves
    train = {load_task(SUMS).problem(index).question for index in range(300)}
    held_out = {load_task(SUMS, "eval").problem(index).question for index in range(100)}
    assert len(train) > 50 and len(held_out) > 15
    assert not train & held_out


def test_another_seed_is_another_stream():
    one, two = (load_task(SUMS.model_copy(update={"seed": seed})) for seed in (0, 1))
    assert [one.problem(i).question for i in range(5)] != [
        two.problem(i).question for i in range(5)
    ]


def test_a_generator_that_is_a_list_wraps_round():
    assert load_task(Task(name="reasoning_gym:word_ladder"), "eval").problem(0).question


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Task(name="reasoning_gym:chain_sun"), "did you mean chain_sum"),
        (
            Task(name="reasoning_gym:chain_sum", options={"terms": 2}),
            "unexpected keyword argument 'terms'",
        ),
        (
            Task(name="reasoning_gym:chain_sum", options={"min_terms": 9, "max_terms": 2}),
            "rejects task.options=",
        ),
        (
            Task(name="sums"),
            "write reasoning_gym:<name>, jsonl:FILE, hf:DATASET, or package.module:function",
        ),
        (
            Task(name="no_such_package:problems"),
            "cannot be imported (No module named 'no_such_package')",
        ),
        (Task(name="megarl.data.tasks:no_such"), "has no 'no_such'; name a function"),
        (Task(name="megarl.data.tasks:ATTEMPTS"), "is a int, not a function"),
        (Task(name="jsonl:nowhere.jsonl"), "nowhere.jsonl does not exist"),
        (
            Task(name="jsonl:x.jsonl", options={"vocab": 67}),
            "it takes prompt, answer, answer_pattern, eval_file; remove it",
        ),
        (
            Task(name="megarl.data.tasks:random_tokens"),
            "megarl.data.tasks:random_tokens rejects task.options={}",
        ),
        (
            Task(name="megarl.data.tasks:random_tokens", options={"vocab": 2}),
            "rejects task.options={'vocab': 2}",
        ),
        (
            Task(name="megarl.data.tasks:random_tokens", options={"vocab": 9, "x": 1}),
            "unexpected keyword argument 'x'",
        ),
        (
            Task(name="megarl.data.tasks:random_tokens", options={"vocab": 9, "split": "train"}),
            "multiple values for keyword argument 'split'",
        ),
    ],
)
def test_wrong_names_and_options(task, says):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(says)):
        check(task)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([""], "has no problem"),
        (['{"prompt": "a"}', "{oops"], "line 2 is not JSON"),
        (['{"prompt": "a"}', "", "[1, 2]"], "line 3 is a list, not an object"),
        (
            ['{"text": "a"}'],
            "line 1 needs exactly one of prompt, question, problem, messages; it has text",
        ),
        (
            ['{"prompt": "a", "question": "b"}'],
            "exactly one of prompt, question, problem, messages; it has prompt, question; write",
        ),
        (['{"prompt": 5}'], 'the prompt must be text, or messages [{"role"'),
        (['{"messages": [{"role": "user"}]}'], "message 1 is {'role': 'user'}; messages are [{"),
        (['{"prompt": ' + "[" * 100_000], "line 1 is not JSON (it is nested more than 100 deep)"),
        (
            ['{"prompt": "a", "answer": ' + "[" * 150 + "]" * 150 + "}"],
            "line 1 is not JSON (it is nested more than",
        ),
        (
            ['{"prompt": "a", "answer": 1' + "0" * 5000 + "}"],
            "line 1 is not JSON (Exceeds the limit",
        ),
        (['{"prompt": ""}'], "line 1: the prompt must be text"),
    ],
)
def test_bad_files_name_the_line(tmp_path, lines, says):
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        check(write(tmp_path, *lines))
    assert "problems.jsonl" in str(error.value)


@pytest.mark.parametrize(
    "row",
    [
        r'{"prompt": "a \ud800 b", "answer": "b"}',
        r'{"prompt": "a", "answer": "\udfff"}',
        r'{"messages": [{"role": "user", "content": "\ud83d\ud83d\ude00"}]}',
        r'{"messages": [{"role": "us\ud800er", "content": "a"}]}',
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_line(tmp_path, row):
    task = write(tmp_path, r'{"prompt": "a \ud83d\ude00", "answer": "\ud83d\ude00"}', row)
    with pytest.raises(
        ValueError, match=r"problems\.jsonl: line 2 has half of a surrogate pair.*; remove it$"
    ) as refused:
        load_task(task)
    assert str(refused.value).encode(), "can be printed"


def test_a_run_with_half_of_a_surrogate_pair_ends_before_it_starts(tmp_path, capsys):
    task = write(tmp_path, r'{"prompt": "a", "answer": "\ud800"}')
    config = tmp_path / "config.yaml"
    values = {
        "run": {"dir": str(tmp_path)},
        "model": {"create": {}},
        "task": {"name": task.name},
        "eval": {"every": 0},
    }
    config.write_text(json.dumps(values))
    assert cli.main(["train", str(config)]) == 2
    assert re.fullmatch(
        r"megarl: \S*problems\.jsonl: line 1 has half of a .*\n", capsys.readouterr().err
    )


def test_lines_end_at_line_feeds_only(tmp_path):
    task = write(tmp_path, '{"prompt": "a\u2028b\x85c", "answer": "5\u2029"}', '{"prompt": "b"}\r')
    source = load_task(task)
    assert [source.problem(index).question for index in range(2)] == ["a\u2028b\x85c", "b"]
    assert source.problem(0).answer == "5\u2029"


@pytest.mark.parametrize("name", [".", "/dev/null", "/dev/zero"])
def test_a_task_file_that_is_no_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"task file {name} does not exist; use a file with one")
    ):
        check(Task(name=f"jsonl:{name}"))


def test_odd_rows_are_read_as_they_are(tmp_path):
    task = write(tmp_path, '{"prompt": "a", "answer": NaN, "response": "b", "tokens": [1]}')
    problem = load_task(task).problem(0)
    assert problem.answer is None and problem.extra == {"response": "b", "tokens": [1]}


def test_jsonl_rows(tmp_path):
    task = write(
        tmp_path,
        '{"question": "1 + 1", "answer": 2, "level": "easy"}',
        "",
        '{"messages": [{"role": "user", "content": "hi"}]}',
    )
    source = load_task(task)
    assert source.size == 2
    assert source.problem(0).answer == "2" and source.problem(0).extra == {"level": "easy"}
    assert source.problem(1).question == ({"role": "user", "content": "hi"},)


def test_jsonl_holds_out_a_second_file(tmp_path):
    task = write(tmp_path, '{"prompt": "a"}', '{"prompt": "b"}', '{"prompt": "c"}')
    with pytest.raises(ValueError, match=re.escape("set task.options.eval_file=FILE")):
        check(task, held_out=True)
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text('{"prompt": "b"}\n')
    task = task.model_copy(update={"options": {"eval_file": str(held_out)}})
    assert [load_task(task).problem(i).question for i in range(2)] == ["a", "c"]
    assert load_task(task, "eval").problem(0).question == "b"


def test_a_function_of_the_users_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_sums.py").write_text(
        "def sums(split, top):\n    return [{'prompt': f'{i} + 1 =', 'answer': i + 1} for i in range(top)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    source = load_task(Task(name="my_sums:sums", options={"top": 3}))
    assert (source.size, source.problem(2).question, source.problem(2).answer) == (
        3,
        "2 + 1 =",
        "3",
    )


def test_checking_a_task_imports_no_torch_and_is_quick(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text("{oops\n")
    code = (
        "import sys, time; start = time.process_time()\n"
        "from megarl.config.schema import Eval, Reward, Task\n"
        "from megarl.data.tasks import check_tasks\n"
        "from megarl.rewards.catalog import make_rewards\n"
        "make_rewards([Reward(name='accuracy'), Reward(name='megarl.rewards.rules:even_fraction'), "
        "Reward(name='code'), Reward(name='http://localhost/score')])\n"
        f"try: list(check_tasks(Task(name='jsonl:{file}'), Eval(), held_out=False, check=print))\n"
        "except ValueError as error: print(error)\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow', 'huggingface_hub'} & sys.modules.keys()\n"
        "assert time.process_time() - start < 2, time.process_time() - start\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "line 1 is not JSON" in done.stdout


# --- the stream of prompts ----------------------------------------------------------------------------------------

LISTED = Task(
    name="megarl.data.tasks:random_tokens", options={"vocab": 67, "size": 10}, template="plain"
)


def stream(task: Task = LISTED, **more) -> PromptStream:
    return PromptStream(
        load_sources(task), example_encoder(TokenIds((2,), 67), task), **({"max_tokens": 8} | more)
    )


def test_a_stream_resumes_where_it_stood():
    whole, part = stream(), stream()
    part.take(7)
    part.kept["groups/kept"] = 3.5
    state = json.loads(json.dumps(part.state()))
    resumed = stream()
    resumed.restore(state)
    assert resumed.kept == {"groups/kept": 3.5}
    assert whole.take(25)[7:] == resumed.take(18)


def test_every_epoch_is_a_new_order_of_all_problems():
    taken = stream().take(20)
    assert [prompt.prompt_id for prompt in taken] == list(range(20))
    first, second = ([prompt.tokens for prompt in part] for part in (taken[:10], taken[10:]))
    assert sorted(first) == sorted(second) and first != second


@given(
    parts=st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10.0)), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    stop=st.integers(0, 5),
    seed=st.integers(0, 3),
)
def test_a_mixture_is_the_same_on_every_rank_and_after_a_resume(
    parts: list[tuple[int, float]], steps: list[int], stop: int, seed: int
) -> None:
    mixture = tuple(
        MixturePart(
            name=LISTED.name, options={"vocab": 67, "size": size, "seed": index}, weight=weight
        )
        for index, (size, weight) in enumerate(parts)
    )
    task = Task(mixture=mixture)
    whole = stream(task, seed=seed)
    taken = [prompt for step in steps for prompt in whole.take(step)]
    resumed = stream(task, seed=seed)  # or another rank
    before = [prompt for step in steps[:stop] for prompt in resumed.take(step)]
    state, resumed = json.loads(json.dumps(resumed.state())), stream(task, seed=seed)
    resumed.restore(state)
    assert before + [prompt for step in steps[stop:] for prompt in resumed.take(step)] == taken
    assert [prompt.prompt_id for prompt in taken] == list(range(len(taken)))
    assert [prompt.tokens for prompt in stream(task, seed=seed).take(len(taken))] == [
        p.tokens for p in taken
    ]


def test_a_stream_draws_from_every_part() -> None:
    parts = [
        MixturePart(name=LISTED.name, options={"vocab": 67, "size": 3, "seed": seed}, weight=1)
        for seed in range(2)
    ]
    alone = [{p.tokens for p in stream(Task(mixture=(part,))).take(3)} for part in parts]
    taken = stream(Task(mixture=tuple(parts))).take(6)
    assert alone[0] != alone[1] and {p.tokens for p in taken} == alone[0] | alone[1]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=6),
    stop=st.integers(0, 5),
)
@example(sizes=[4, 6], steps=[(10, 0), (10, 0)], stop=1)
def test_prompts_that_are_put_back_come_again(
    sizes: list[int], steps: list[tuple[int, int]], stop: int
) -> None:
    """As if they had not been taken, those that are too long among them, and after a resume."""
    parts = ({"vocab": 67, "size": size + 5, "seed": index} for index, size in enumerate(sizes))
    task = Task(
        mixture=[{"name": LISTED.name, "options": options, "weight": 1.0} for options in parts]
    )
    trained, now = [], stream(task, max_tokens=6)
    for number, (count, back) in enumerate(steps):
        if number == stop:
            state = json.loads(json.dumps(now.state()))
            now.restore(state | {"position": now.position + 3})  # elsewhere, and back
            now.take(2)
            now.restore(state)
        taken = now.take(count)
        used = max(count - back, 0)
        now.put_back(taken[used:])
        trained += taken[:used]
    alone = stream(task, max_tokens=6)
    assert trained == alone.take(len(trained))
    assert (now.take(3), now.position, now.skipped) == (
        alone.take(3),
        alone.position,
        alone.skipped,
    )


def test_every_part_of_a_mixture_has_its_own_epochs() -> None:
    """A part of 3 problems and one of 10, three to one."""
    small, large = (LISTED.options | {"size": size, "seed": size} for size in (3, 10))
    task = Task(
        mixture=[
            {"name": LISTED.name, "options": small, "weight": 3},
            {"name": LISTED.name, "options": large},
        ]
    )
    taken = [prompt.tokens for prompt in stream(task).take(40)]
    rows = {text["prompt"] for text in random_tokens(split="train", **small)}
    of_small = [tokens for tokens in taken if " ".join(map(str, tokens)) in rows]
    assert len(of_small) == 30 and len(set(taken) - set(of_small)) == 10
    epochs = [of_small[start : start + 3] for start in range(0, 30, 3)]
    assert all(set(epoch) == set(of_small) for epoch in epochs) and len(set(map(tuple, epochs))) > 1


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), st.integers(1, 2000))
def test_a_mixture_keeps_its_proportions_at_every_length(weights: list[float], count: int) -> None:
    sources = [
        Source(partial(Problem, str(part)), None, weight=weight)
        for part, weight in enumerate(weights)
    ]
    drawn = PromptStream(sources, lambda problem: ((1,), ()), max_tokens=1).take(count)
    for part, weight in enumerate(weights):
        numbers = [prompt.answer for prompt in drawn if prompt.text == str(part)]
        assert numbers == list(range(len(numbers)))
        assert abs(len(numbers) - count * weight / sum(weights)) <= (len(weights) - 1) / 2 + 1e-6


def test_a_resume_far_into_a_mixture_takes_seconds() -> None:
    late = stream(
        Task(
            mixture=[
                {"name": LISTED.name, "options": {"vocab": 67}, "weight": w} for w in (1, 2, 3)
            ]
        )
    )
    late.restore({"position": 1_000_000, "skipped": 0})
    start = time.process_time()
    assert late.take(1)[0].prompt_id == 1_000_000
    assert time.process_time() - start < 5
    for _ in range(30):  # without counting from the start each time
        late.put_back(late.take(9)[1:])
    assert late.take(1)[0].prompt_id == 1_000_031 and time.process_time() - start < 6


def test_without_repeats_a_stream_ends_when_every_problem_was_seen() -> None:
    small, large = (LISTED.options | {"size": size, "seed": size} for size in (2, 9))
    task = Task(
        mixture=[
            {"name": LISTED.name, "options": small, "weight": 5},
            {"name": LISTED.name, "options": large},
        ]
    )
    taken = [prompt.tokens for prompt in stream(task).take(100, repeat=False)]
    assert len(taken) == len(set(taken)) == 11
    assert len(stream(task).take(5, repeat=False)) == 5
    assert len(stream(max_tokens=4).take(10, repeat=False)) < 10, (
        "problems that are too long are not replaced"
    )


def test_size_limits_the_problems_not_the_stream():
    assert (
        len({prompt.tokens for prompt in stream(LISTED.model_copy(update={"size": 3})).take(12)})
        == 3
    )


def test_long_prompts_are_skipped_and_counted_and_given_up_on():
    short = stream(max_tokens=4)
    taken = short.take(5)
    assert all(len(prompt.tokens) <= 4 for prompt in taken)
    assert short.skipped == taken[-1].prompt_id + 1 - 5 > 0
    with pytest.raises(ValueError, match=re.escape("rollout.max_prompt_tokens=1")):
        stream(max_tokens=1).take(1)


def test_random_tokens_differ_between_splits_and_stay_in_the_vocabulary():
    train, held_out = (random_tokens(split=split, vocab=67, size=50) for split in ("train", "eval"))
    assert train != held_out
    ids = [int(word) for row in train for word in row["prompt"].split()]
    assert min(ids) >= 4 and max(ids) < 67
