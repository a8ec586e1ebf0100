"""What needs a task's or a reward's code is asked before a process starts, for the command that is given."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.commands.preflight import preflight
from megarl.commands.random_model import create_model
from megarl.config.load import parse_config
from megarl.config.schema import Config, Create
from megarl.platform import env as packages
from megarl.platform.env import Env

ALONE = Env()


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    for name, prompt in (("train", "1+1="), ("eval", "2+2=")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{prompt}", "answer": "2"}}\n')
    return {
        "name": f"jsonl:{tmp_path}/train.jsonl",
        "options": {"eval_file": f"{tmp_path}/eval.jsonl"},
    }


def made(task: dict[str, Any], create: dict[str, Any] | None = None, **sections: Any) -> Config:
    return parse_config({"model": {"create": create or {}}, "task": task, **sections})


@pytest.mark.parametrize(
    ("create", "sections", "says"),
    [
        ({"head_dim": 16}, {}, "head_dim=16, but vLLM's attention on CPU supports"),
        ({}, {"rewards": [{"name": "acuracy"}]}, "did you mean accuracy"),
        ({}, {"rewards": []}, "rewards is empty"),
    ],
)
def test_eval_after_sft_needs_an_engine_and_rewards(
    task: dict[str, Any], create: dict[str, Any], sections: dict[str, Any], says: str
) -> None:
    config = made(task, create, stage="sft", **sections)
    assert preflight(config, ALONE), "SFT itself needs neither"
    with pytest.raises(ValueError, match=re.escape(says)):
        preflight(config, ALONE, command="eval")


def test_problems_are_held_out_where_they_are_asked_for(task: dict[str, Any]) -> None:
    assert preflight(made(task, eval={"every": 1}), ALONE)
    assert preflight(made(task), ALONE, command="eval")
    only = {"name": task["name"]}
    assert preflight(made(only), ALONE)
    for stage in ("rl", "sft"):
        with pytest.raises(ValueError, match=re.escape("set task.options.eval_file=FILE")):
            preflight(made(only, eval={"every": 1}, stage=stage), ALONE)
    with pytest.raises(ValueError, match=re.escape("set task.options.eval_file=FILE")):
        preflight(made(only), ALONE, command="eval")


def test_only_a_dry_run_needs_no_weights(task: dict[str, Any], tmp_path: Path) -> None:
    file = create_model(Create(), tmp_path / "whole") / "config.json"
    folder = tmp_path / "alone"
    folder.mkdir()
    file.rename(folder / "config.json")
    config = parse_config({"model": {"path": str(folder)}, "task": {**task, "template": "plain"}})
    assert preflight(config, ALONE)
    with pytest.raises(ValueError, match=re.escape("alone has no *.safetensors")):
        preflight(config, ALONE, is_dry=False)


def test_a_tokenizer_that_cannot_be_loaded_is_refused_before_a_process_starts(
    task: dict[str, Any], tmp_path: Path
) -> None:
    folder = create_model(Create(), tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["code.Special", null]}}'
    )
    model = {"path": str(folder)}
    with pytest.raises(
        ValueError,
        match=re.escape("is code (['code.Special', None]); set model.trust_remote_code=true"),
    ):
        preflight(parse_config({"model": model, "task": task}), ALONE)
    with pytest.raises(ValueError, match=re.escape("cannot be loaded")):  # there is no code.py
        preflight(
            parse_config({"model": {**model, "trust_remote_code": True}, "task": task}), ALONE
        )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "task.template_args={enable_thinking: false}",
            "task.template_args has enable_thinking, which the model's chat template never reads (it reads no such "
            "variables); remove enable_thinking",
        ),
        (
            "rollout.stop=['</s>']",
            "rollout.stop has '</s>', which the model's tokenizer splits into ['<', '/', 's', '>'], but a response "
            "ends with one token; choose a text that is a single token, or remove it",
        ),
        (
            "task={template: plain, system_prompt: Add.}",
            "task.system_prompt needs a chat template, but the model's tokenizer has none, or task.template is plain; "
            "remove it, or use a chat model",
        ),
        (
            "task={template: chat, name: 'megarl.data.tasks:random_tokens', options: {vocab: 67}}",
            "megarl.data.tasks:random_tokens row 0: without a tokenizer there is no chat template; use task.template: plain and text prompts",
        ),
        (
            "task.answer=box",
            "task.answer='box' on the command line is invalid: it should be 'auto', 'tag', 'boxed', 'last_line', "
            "'last_number' or 'whole'; see `megarl explain task.answer`",
        ),
    ],
)
def test_what_the_tokenizer_cannot_do_is_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, line: str
) -> None:
    tokenizer = "none" if "random_tokens" in override else "characters"
    (tmp_path / "c.yaml").write_text(
        f"run: {{dir: {tmp_path}/runs}}\nmodel: {{create: {{tokenizer: {tokenizer}}}}}\nrollout: {{max_tokens: 16}}\n"
    )
    code = main(["train", str(tmp_path / "c.yaml"), override])
    assert (code, capsys.readouterr().err) == (2, f"megarl: {line}\n")
    assert not (tmp_path / "runs").exists()
    accepted = (
        "task={system_prompt: Add., answer: tag}",
        "rollout.stop=['>']",
        "model.create.tokenizer=characters",
    )
    assert main(["train", str(tmp_path / "c.yaml"), "--dry-run", *accepted]) == 0


def demanding(response: str, criteria: str) -> float:
    return float(criteria in response)


def test_what_ranks_samples_for_a_reward_model_is_checked_too(task: dict[str, Any]) -> None:
    labels = [{"name": f"{__name__}:demanding"}]
    for sections in (
        {"rewards": labels},
        {"stage": "iterative_grpo", "iterative": {"reward_model": {"labels": labels}}},
    ):
        rewards = {"rewards": [{"name": "model"}]} | sections
        with pytest.raises(
            ValueError, match=r"demanding' cannot score 1 of 1 problems; .* criteria"
        ):
            preflight(made(task, **rewards), ALONE)


def test_trackers_are_checked_for_the_runs_that_use_them(
    task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: "tensorboard" not in module)
    config = made(task, telemetry={"tensorboard": True})
    with pytest.raises(ValueError, match=re.escape("telemetry.tensorboard=true needs TensorBoard")):
        preflight(config, ALONE)
    assert preflight(config, ALONE, command="eval"), "it has no metrics"
    assert preflight(config, Env(rank=1, world_size=2), command="train"), "rank 0 writes"


UNDEFINED = "transformer_engine_torch.so: undefined symbol: _ZN3c105ErrorC2E"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", None),
        (f"raise ImportError({UNDEFINED!r})", f"ImportError: {UNDEFINED}"),
        ("import os; os.abort()", ""),
    ],
)
def test_transformer_engine_built_for_another_torch_is_refused(
    task: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    reason: str | None,
) -> None:
    """Before ranks start, by one process of a node, and only if its layers are used."""
    monkeypatch.setattr("megarl.config.validate.count_gpus", lambda: 1)
    with pytest.raises(ValueError, match="a GPU needs Transformer Engine: pip install megarl"):
        preflight(made(task), ALONE)
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch/__init__.py").write_text(source)
    metadata = tmp_path / "transformer_engine-2.20.2.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    local = {"transformer_impl": "local", "unsafe": True}
    assert preflight(made(task, trainer={"megatron_options": local}), ALONE)
    assert preflight(made(task), Env(rank=1, world_size=2, local_rank=1, local_world_size=2))
    if reason is None:
        assert preflight(made(task), ALONE)
        return
    with pytest.raises(ValueError, match="does not load beside torch") as refused:
        preflight(made(task), ALONE)
    assert f"torch {version('torch')}: {reason}; build it for this torch" in str(refused.value)
    assert str(refused.value).endswith(
        "--no-build-isolation --no-cache-dir --force-reinstall --no-deps "
        "transformer-engine-torch==2.20.2"
    )
