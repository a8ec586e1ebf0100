"""A resumed run continues with the settings it began with, unless the user asks for others."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.commands import start
from megarl.config.load import load_config, parse_config
from megarl.config.run_dir import FREE, check_resumed, make_run_dir, prepare_run_dir
from megarl.config.schema import Config

START = {"train.lr": 1e-4, "train.steps": 4, "rollout.samples_per_prompt": 8, "model.path": "none"}


def config(folder: Path, **changes) -> Config:
    nested: dict = {"run": {"dir": str(folder), "name": "run"}}
    for key, value in (
        START | {key.replace("__", "."): value for key, value in changes.items()}
    ).items():
        *sections, name = key.split(".")
        section = nested
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return parse_config(nested)


def begun(folder: Path) -> Path:
    """A run with a checkpoint."""
    prepare_run_dir(config(folder), "train")
    (folder / "run" / "checkpoints" / "step_2").mkdir(parents=True)
    return folder / "run"


REFUSED = {
    "train__lr": (1e-3, "train.lr 0.0001 -> 0.001"),
    "train__schedule": ("cosine", 'train.schedule "constant" -> "cosine"'),
    "rollout__samples_per_prompt": (4, "rollout.samples_per_prompt 8 -> 4"),
    "algorithm__normalise_rewards": (True, "algorithm.normalise_rewards false -> true"),
    "train__betas": ([0.8, 0.9], "train.betas [0.9, 0.95] -> [0.8, 0.9]"),
    "run__seed": (5, "run.seed 0 -> 5"),
    "algorithm__preset": ("dapo", 'algorithm.preset "grpo" -> "dapo"'),
    "stage": ("sft", 'stage "rl" -> "sft"'),
    "rewards": ([{"name": "format"}], "rewards [{"),
    "task__options": ({"a": 1}, "task.options"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_other_settings_are_refused_by_name(tmp_path: Path, key: str) -> None:
    value, said = REFUSED[key]
    run = begun(tmp_path)
    before = (run / "config.yaml").read_text()
    with pytest.raises(ValueError) as refused:
        check_resumed(config(tmp_path, **{key: value}))
    assert said in str(refused.value) and "--resume-changed" in str(refused.value)
    assert (run / "config.yaml").read_text() == before
    check_resumed(config(tmp_path, **{key: value}, checkpoint__resume="never"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train__steps", 9), ("eval__every", 3), ("checkpoint__every", 7), ("telemetry__tensorboard", True),
        ("parallel__tensor", 2), ("launch__timeout_s", 9), ("train__max_tokens_per_microbatch", 64),
        ("rollout__cpu_kv_cache_gb", 2.0), ("checks__probe", "always"), ("sync__atomic", False),
    ],
)  # fmt: skip
def test_what_does_not_change_the_result_may_change(
    tmp_path: Path, key: str, value: object
) -> None:
    begun(tmp_path)
    check_resumed(config(tmp_path, **{key: value}))


def test_each_part_leaves_its_config(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert prepare_run_dir(config(tmp_path), "train") == run / "config.yaml"
    changed = config(tmp_path, train__lr=1e-3)
    assert prepare_run_dir(changed, "train") == run / "config_2.yaml"
    assert (
        (run / "config_2.yaml")
        .read_text()
        .startswith("# Resumed; changed: train.lr 0.0001 -> 0.001\n")
    )
    assert load_config(run / "config_2.yaml") == changed and load_config(
        run / "config.yaml"
    ) == config(tmp_path)
    check_resumed(changed)  # compared with the newest part
    with pytest.raises(ValueError, match=r"config_2.yaml.*train.lr 0.001 -> 0.0001"):
        check_resumed(config(tmp_path))
    assert prepare_run_dir(config(tmp_path, train__lr=1.0), "train").name == "config_3.yaml"
    afresh = config(tmp_path, checkpoint__resume="never")
    assert prepare_run_dir(afresh, "train") == run / "config.yaml"
    assert [file.name for file in run.glob("config*")] == ["config.yaml"] and load_config(
        run / "config.yaml"
    ) == afresh


def test_a_complete_run_is_told_from_one_that_resumes(tmp_path: Path) -> None:
    run = begun(tmp_path)
    end = run / "exit.json"
    assert not check_resumed(config(tmp_path)), "it has not ended"
    end.write_text('{"code": 143}')
    assert not check_resumed(config(tmp_path)), "it was stopped"
    end.write_text('{"code": 0}')
    assert check_resumed(config(tmp_path))
    assert not check_resumed(config(tmp_path, train__steps=9)), "it has more to do"
    for resume in ("never", str(run / "checkpoints" / "step_2")):
        again = config(tmp_path, checkpoint__resume=resume)
        prepare_run_dir(again, "train")
        end.write_text('{"code": 0}')
        assert not check_resumed(again), "asked for explicitly"


def test_another_runs_checkpoint_and_another_model(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for width in (64, 128):
        (tmp_path / f"{width}").mkdir()
        (tmp_path / f"{width}" / "config.json").write_text(f'{{"hidden_size": {width}}}')
    (run / "config.yaml").unlink()
    check_resumed(config(tmp_path))  # nothing to compare with
    prepare_run_dir(config(tmp_path, model__path=str(tmp_path / "64")), "train")
    other = {"run__name": "other", "checkpoint__resume": str(run / "checkpoints" / "step_2")}
    with pytest.raises(ValueError, match=r"config.json: hidden_size 64 -> 128"):
        check_resumed(config(tmp_path, model__path=str(tmp_path / "128"), **other))
    check_resumed(config(tmp_path, model__path=str(tmp_path / "64"), **other))


def test_a_created_model_is_the_same_in_a_folder_that_moved(tmp_path: Path) -> None:
    begun(tmp_path)
    prepare_run_dir(config(tmp_path, model__path="runs/.models/abc"), "train")
    check_resumed(config(tmp_path, model__path=str(tmp_path / ".models" / "abc")))
    with pytest.raises(ValueError, match=r"model.path"):
        check_resumed(config(tmp_path, model__path="runs/.models/def"))


def test_free_keys_exist() -> None:
    for key in FREE.split():
        section = Config()
        for part in key.split("."):
            section = getattr(section, part)


def test_a_read_only_run_dir_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that exists."""
    (tmp_path / "run").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "megarl-test", tmp_path / "run"]
    ).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        with pytest.raises(
            ValueError, match=r"cannot write to .*run \(Read-only file system\); set run.dir"
        ):
            make_run_dir(config(tmp_path))
        assert (
            main(["train", "configs/tiny_dense.yaml", f"run.dir={tmp_path}", "run.name=run"]) == 2
        )
    finally:
        subprocess.run(["umount", "-l", tmp_path / "run"], check=True)
    err = capsys.readouterr().err
    assert err.startswith("megarl: cannot write to ") and err.count("\n") == 1, err


def test_the_command_line_refuses_and_confirms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    launched: list[float] = []
    monkeypatch.setattr(
        start, "launch", lambda env, config, job, command: launched.append(config.train.lr) or 1
    )
    common = ["train", "configs/tiny_dense.yaml", f"run.dir={tmp_path}", "run.name=run"]
    assert main(common) == 1
    prepare_run_dir(load_config(common[1], common[2:]), "train")
    (tmp_path / "run" / "checkpoints" / "step_2").mkdir(parents=True)
    assert main([*common, "train.lr=1e-3"]) == 2
    assert "train.lr 0.0005 -> 0.001" in capsys.readouterr().err
    assert main([*common, "train.lr=1e-3", "--resume-changed"]) == 1
    assert launched == [5e-4, 1e-3]


@pytest.mark.parametrize("code", [0, 3])
def test_a_full_disk_is_said_once(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """By the run that ended by it, not again for its report."""

    def full(_folder: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(start, "launch", lambda *_: code)
    monkeypatch.setattr("megarl.telemetry.report.write_report", full)
    common = ["train", "configs/tiny_dense.yaml", f"run.dir={tmp_path}", "run.name=run"]
    assert main(common) == 3
    assert capsys.readouterr().err.count(f"the disk of {tmp_path / 'run'}") == (code == 0)
