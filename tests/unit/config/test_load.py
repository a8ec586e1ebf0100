"""A config file, its overrides and its preset become one Config, or one line of error."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.load import (
    load_config,
    parse_config,
    resolved_yaml,
)
from megarl.config.presets import PRESETS
from megarl.config.schema import Config, ParallelSizes

BASE = """\
run: {name: base}
model:
  create: {family: qwen3}
train:
  lr: 1e-4
  steps: 7
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    file = tmp_path / "base.yaml"
    file.write_text(BASE)
    return file


def test_overrides_win_and_are_read_as_yaml(base: Path) -> None:
    config = load_config(
        base,
        ["train.steps=3", "train.betas=[0.8, 0.9]", "train.lr=2e-5", "task.options={max: 3e1}"],
    )
    assert (config.train.steps, config.train.betas, config.train.lr) == (3, (0.8, 0.9), 2e-5)
    assert config.task.options == {"max": 30.0}, (
        "1e1-style numbers are numbers, also where no type says so"
    )
    assert load_config(base).train.steps == 7


def test_path_on_the_command_line_replaces_create(base: Path) -> None:
    assert load_config(base, ["model.path=/some/where"]).model.model_dump() == {
        "path": "/some/where",
        "revision": None,
        "create": None,
        "trust_remote_code": False,
    }


def test_another_task_on_the_command_line_does_not_get_the_options_of_the_files(
    tmp_path: Path,
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("task: {name: 'a.b:f', template: plain, options: {vocab: 67, size: 3}}\n")
    task = load_config(file, ["task.options.size=4", "task.name=jsonl:x.jsonl"]).task
    assert (task.options, task.template) == ({"size": 4}, "plain"), (
        "those of the command line are the new task's"
    )
    assert load_config(file, ["task.name=a.b:f"]).task.options == {"vocab": 67, "size": 3}
    assert load_config(file, ["task.options.size=4"]).task.options == {"vocab": 67, "size": 4}
    file.write_text("task: {options: {max_terms: 2}}\n")  # of the default task
    assert load_config(file, [f"task.name={Config().task.name}"]).task.options == {"max_terms": 2}
    assert load_config(file, ["task.name=a.b:f"]).task.options == {}


def test_a_task_on_the_command_line_replaces_a_mixture_and_the_reverse(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "task: {template: plain, mixture: [{name: 'a.b:f', weight: 2}, {name: 'a.b:g'}]}\n"
    )
    task = load_config(file, ["task.name=a.b:h"]).task
    assert (task.name, task.mixture, task.template) == ("a.b:h", (), "plain")
    assert [part.weight for part in load_config(file).task.mixture] == [2.0, 1.0]
    assert load_config(file, [f"task.name={Config().task.name}"]).task.mixture == ()
    file.write_text("task: {name: 'a.b:f', options: {size: 3}}\n")
    task = load_config(file, ["task.mixture=[{name: 'a.b:g'}]"]).task
    assert (task.name, task.options, task.mixture[0].name) == (Config().task.name, {}, "a.b:g")


def test_a_weight_that_is_not_positive_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("task:\n  mixture:\n  - {name: 'a.b:f', weight: 0}\n")
    with pytest.raises(ValueError, match=re.escape("weight=0")) as error:
        load_config(file)
    assert "line 3" in str(error.value) and "greater than 0" in str(error.value)


def test_resolved_reads_back_the_same(base: Path) -> None:
    config = load_config(base, ["algorithm.preset=reinforce_pp", "algorithm.kl.coef=0.5"])
    assert parse_config(yaml.safe_load(resolved_yaml(config))) == config


@given(st.sampled_from(sorted(PRESETS)), st.floats(0.0, 0.9), st.floats(0.0, 2.0))
def test_explicit_values_win_over_any_preset(preset: str, clip: float, coef: float) -> None:
    algorithm = parse_config(
        {"algorithm": {"preset": preset, "clip_low": clip, "kl": {"coef": coef}}}
    ).algorithm
    assert (algorithm.clip_low, algorithm.kl.coef, algorithm.preset) == (clip, coef, preset)
    expected = PRESETS[preset].get("kl", {}).get("estimator", Config().algorithm.kl.estimator)
    assert algorithm.kl.estimator == expected, "the rest of a section still comes from the preset"
    assert (
        parse_config(yaml.safe_load(resolved_yaml(Config(algorithm=algorithm)))).algorithm
        == algorithm
    )


def test_options_of_another_function_do_not_follow_a_changed_name() -> None:
    kept = parse_config(
        {"algorithm": {"preset": "grpo", "correction": PRESETS["grpo"]["correction"]}}
    ).algorithm
    assert kept.correction_options == PRESETS["grpo"]["correction_options"]
    assert (
        parse_config(
            {"algorithm": {"preset": "grpo", "correction": "none"}}
        ).algorithm.correction_options
        == {}
    )


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["train.stepz=3"], ["train.stepz", "on the command line", "did you mean steps?"]),
        (["lr=1"], ["unknown key lr", "train.lr"]),
        (["zzzz.steps=1"], ["unknown key zzzz", "known keys here", "train"]),
        (["rewards=[{name: a, wieght: 2}]"], ["rewards.0.wieght", "did you mean weight?"]),
        (["rewards=[{name:a.b:c}]"], ["rewards.0.name:a.b:c", "known keys here: name, weight"]),
        (["train.steps=abc"], ["train.steps='abc'", "integer"]),
        (["train.steps=-1"], ["train.steps=-1", "greater than or equal to 0"]),
        (["train.dtype=fp16"], ["train.dtype='fp16'", "'fp32' or 'bf16'"]),
        (["algorithm.preset=gprp"], ["algorithm.preset='gprp'", "grpo"]),
        (["algorithm=3"], ["algorithm=3", "on the command line"]),
        (["train.betas=[0.9]"], ["train.betas.1", "missing"]),
        (["train.steps"], ["'train.steps'", "section.key=value"]),
        (["task.options={a: [}"], ["task.options", "quote"]),
        (["rewards=[{name: a, weight: .nan}]"], ["rewards.0.weight=nan", "finite"]),
        (["rewards=[{name: a, weight: .inf}]"], ["rewards.0.weight=inf", "finite"]),
        (["run.name=a/b"], ["run.name='a/b'"]),
    ],
)
def test_errors_are_one_line_with_the_key_the_place_and_the_remedy(
    base: Path, overrides: list[str], parts: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(base, overrides)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


SECTION_8 = """
run: {name: quickstart, dir: runs, seed: 0}
model: {path: DIR, trust_remote_code: false}
stage: rl
checks: {max_logprob_diff: null, probe: first}
task: {name: "reasoning_gym:chain_sum"}
rewards: [{name: accuracy, weight: 1.0}, {name: format, weight: 0.1}]
algorithm: {preset: grpo}
parallel: {tensor: 1, pipeline: 1, virtual_pipeline: 1, context: 1, expert: 1, expert_tensor: 1}
rollout: {tensor: 1, samples_per_prompt: 8, max_tokens: 256, temperature: 1.0, top_p: 1.0, max_staleness: 0}
train: {steps: 100, prompts_per_step: 32, updates_per_step: 1, lr: 1.0e-6, min_lr: 0.0, warmup_steps: 0,
  schedule: constant, weight_decay: 0.0, betas: [0.9, 0.95], clip_grad: 1.0,
  max_tokens_per_microbatch: 16384, dtype: bf16}
precision: {fp8: null}
checkpoint: {every: 50, keep: 3, resume: auto, export_hf: never}
sync: {atomic: true, round_bytes: 536870912}
launch: {topology: colocated, processes: null, processes_per_node: null}
moe: {aux_loss: 0.0, dispatcher: alltoall}
eval: {every: 0, size: 256, temperature: 0.0}
telemetry: {tensorboard: false, wandb: null}
"""


def test_every_documented_key_is_there_with_its_default() -> None:
    documented = yaml.safe_load(SECTION_8)
    config, default = parse_config(documented), parse_config({})
    for section in documented:
        if section not in ("run", "model", "rewards"):
            assert getattr(config, section) == getattr(default, section), section


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "train:\n  steps: 3\n  stepz: 4\n",
            ["c.yaml line 3", "train.stepz", "did you mean steps?"],
        ),
        ("train:\n  steps: 3\n  steps: 4\n", ["train.steps is set twice", "line 2", "line 3"]),
        ("train:\n  steps: x\n", ["c.yaml line 2", "train.steps='x'"]),
        ("train: {steps: 3\nrun: 3", ["c.yaml", "not YAML"]),
        ("- a\n", ["contains a list"]),
        ("train: 3\n", ["train=3", "line 1"]),
        ("run: {}\nrewards: [{weight: 1.0}]\n", ["rewards.0.name", "line 2"]),
    ],
)
def test_errors_in_a_file_name_its_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_config(file)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"run:\n  name: caf\xe9\n", ["utf-8", "position 16", "check that it is in UTF-8"]),
        (b"run:\n  name: a\x01b\n", ["not YAML", "unacceptable character #x0001", "position 14"]),
        (b"run: &a {name: *b}\n", ["line 1", "not YAML", "alias"]),
        (b"run: !!python/none x\n", ["line 1", "not YAML", "constructor"]),
        (b"a: 1\n---\nb: 2\n", ["line 2", "not YAML"]),
    ],
)
def test_what_is_no_yaml_is_one_line_with_the_file(
    tmp_path: Path, content: bytes, parts: list[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_config(file)
    text = str(caught.value)
    assert type(caught.value) is ValueError and "\n" not in text
    for part in ["c.yaml", *parts]:
        assert part in text, text


BOMB = "\n".join(
    [
        "a0: &a0 [lol, lol]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
    ]
)


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        (BOMB, 1, "more than 100000 values"),
        ("task:\n  options:\n" + "\n".join(f"    {line}" for line in BOMB.splitlines()), 3, "more than 100000 values"),
        ("<<: [" + "*m, " * 9 + "*m]\nm: &m {a: 1}", 1, "undefined alias"),
        ("a: &a [*a]", 1, "nested too deeply"),
        ("task: {options: &a {b: *a}}", 1, "nested too deeply"),
        ("a: 1\nb: &b {<<: *b}", 2, "nested too deeply"),
        ("a: 1\nb: " + "[" * 5000, 2, "nested too deeply"),
        ("a: 1\nb: " + "{a: " * 5000, 2, "nested too deeply"),
        ("\n".join(" " * n + "a:" for n in range(1000)), None, "nested too deeply"),
        ("run:\n  seed: " + "9" * 5000, 2, "is not of type int"),
        ("run:\n  seed: 0x" + "f" * 5000, 2, "is not decimal"),
        ("run:\n  seed: 1" + ":10" * 5000, 2, "is not decimal"),
        ("run:\n  seed: 2001-02-30", 2, "'2001-02-30' is not of type timestamp"),
        ("run:\n  seed: !!bool x", 2, "'x' is not of type bool"),
        ("run:\n  seed: !!int ''", 2, "'' is not of type int"),
        ("run:\n  seed: !!timestamp x", 2, "'x' is not of type timestamp"),
        ("a: !!python/object/apply:os.system ['true']", 1, "could not determine a constructor"),
        ("a: !!python/name:os.system", 1, "could not determine a constructor"),
        ("? {a: 1}\n: 2", 1, "found unhashable key"),
        ("? [[a]]\n: 2", 1, "found unhashable key"),
    ],
)  # fmt: skip
def test_yaml_that_is_a_trap_is_one_line_at_once(
    tmp_path: Path, text: str, line: int | None, part: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    began = time.process_time()
    with pytest.raises(ValueError) as caught:
        load_config(file)
    message = str(caught.value)
    assert type(caught.value) is ValueError and "\n" not in message and len(message) < 500
    assert part in message and message.startswith(f"{file} line {line or ''}"), message
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "value", ["[" * 5000, "&a [*a]", "9" * 5000, "!!python/object/apply:os.system ['true']", "\0"]
)
def test_an_override_that_is_a_trap(base: Path, value: str) -> None:
    with pytest.raises(
        ValueError, match=r"^the value of run\.name=.* is not YAML.*; quote it$"
    ) as caught:
        load_config(base, [f"run.name={value}"])
    assert len(str(caught.value)) < 400


def test_aliases_are_read(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("rollout: &sizes {tensor: 2}\nparallel: {<<: *sizes, pipeline: 3}\n")
    assert load_config(file).parallel == ParallelSizes(tensor=2, pipeline=3)


NUMBERS = ["train.lr", "train.min_lr", "train.weight_decay", "train.eps", "train.clip_grad", "rollout.temperature",
           "rollout.top_p", "algorithm.clip_high", "algorithm.kl.coef", "checks.max_logprob_diff"]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "part"),
    [
        *((f"{key}={value}", "finite") for key in NUMBERS for value in (".nan", ".inf", "-.inf")),
        ("train.eps=-1", "greater than or equal to 0"),
        ("train.betas=[.nan, 0.9]", "finite"),
        ("algorithm.reward_clip=[-.inf, 1]", "finite"),
        ("run.name=../../x", "pattern"),
        ("run.name=..", "pattern"),
        ("run.name=.hidden", "pattern"),
        ("run.name='abc\n\n'", "pattern"),
        ('run.name="abc\\n"', "pattern"),
        ('run.name="abc\\0"', "'abc\\x00' has a control character; remove it"),
        ('run.dir="runs\\e[2J"', "has a control character"),
        (
            'run.dir="runs\\nmegarl: done"',
            "run.dir='runs\\nmegarl: done' on the command line is invalid: it should be text on one line",
        ),
        ('model.path="a\\u2028b"', "it should be text on one line"),
        ('telemetry.wandb="a\\nb"', "pattern"),
        ('telemetry.wandb="a\\rb"', "pattern"),
        ('task.options={eval_file: "a\\0"}', "has a control character"),
        ('rewards=[{name: "a.b:c\\n"}]', "it should be text on one line"),
        (
            "train.steps=true",
            "train.steps=True on the command line is invalid: it should be a number or text, not true or false",
        ),
        ("train.lr=yes", "not true or false"),
        ("train.betas=[true, 0.9]", "not true or false"),
        ("run.seed=off", "not true or false"),
        ("checkpoint.export_hf=on", "not true or false"),
        ("rollout.max_tokens=false", "not true or false"),
        ("launch.fallback_layouts=[{processes: true}]", "not true or false"),
        (
            "model.revision=1.10",
            "model.revision=1.1 on the command line is invalid: it should be text; put it in quotes",
        ),
        ("model.revision=12e45", "it should be text; put it in quotes"),
        (
            "train.steps=010",
            "'010' is not decimal, so readers of YAML differ; write it so, or quote it",
        ),
        ("run.name=1:30", "'1:30' is not decimal"),
        ("train.lr=1:30.5", "'1:30.5' is not decimal"),
        ("train.steps=0x10", "'0x10' is not decimal"),
        ("train={steps: 1, steps: 2}", "steps is set twice, in train on the command line"),
        ("task.options={a: {b: 1, b: 2}}", "a.b is set twice, in task.options on the command line"),
        (f"run.name={'a' * 5000}", "at most 200 characters"),
        ("run.__class__=x", "unknown key run.__class__"),
    ],
)
def test_values_that_are_refused(base: Path, override: str, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)) as caught:
        load_config(base, [override])
    message = str(caught.value)
    assert override.partition("=")[0] in message and "\n" not in message and len(message) < 400


def test_a_missing_file_names_its_neighbours(base: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"did you mean .*base\.yaml"):
        load_config(base.with_name("bose.yaml"))


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("")
    config = load_config(file, ["run.name=7"])
    assert config.run_dir == Path("runs/7")


def test_config_imports_no_heavy_package() -> None:
    code = "import megarl.config.validate, megarl.processes.spawn, megarl.cli, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "vllm", "megatron", "ray", "transformers", "matplotlib"} & set(loaded)


def test_a_folder_as_config_is_refused_with_the_file_to_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is not a file; .* its config\.yaml"):
        load_config(tmp_path)
