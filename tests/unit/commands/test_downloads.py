"""Hub ids as `model.path`, against a local hub: what is downloaded, when, and one line for each way of failing."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.random_model import create_model
from megarl.config.load import load_config
from megarl.config.schema import Create
from megarl.processes.shared_memory import lock_shm, shm_prefix, unlink_shm
from tests.hub import Hub, Repo, serve_hub

# Runs several commands in one process and prints [[exit code, stdout, stderr], ...]
PROGRAM = """
import contextlib, io, json, sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.02))  # the hub's client waits 31 s between its six tries
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("vllm", "megatron"):  # the tokenizer is loaded, to read the prompts
            raise AssertionError(name + " was imported")
sys.meta_path.insert(0, Refuse())
from megarl.cli import main
results = []
for args in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(args)
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""
CONFIG = "run: {dir: RUNS}\nmodel: {path: org/model}\ntask: {name: jsonl:task.jsonl}\nrollout: {max_tokens: 16}\n"
DISTILL = "algorithm.distill_coef=1"
OTHERS = [
    "algorithm.preset=ppo", "algorithm.kl={where: reward, coef: 0.1}", DISTILL, "critic.model=org/value@v1",
    "teacher.model=org/teacher", "reference.model=org/reference",
    "rewards=[{name: model, options: {path: org/reward}}]",
]  # fmt: skip
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = create_model(
        Create(layers=1, hidden=64, heads=2, kv_heads=1), tmp_path_factory.mktemp("models")
    )
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub(model: dict[str, bytes]) -> Iterator[Hub]:
    others = {
        "README.md": b"", "pytorch_model.bin": b"x", "model.gguf": b"x", "tokenizer_code.py": b"#",
        "onnx/config.json": b"{}", "original/model.safetensors": b"x", "consolidated.safetensors": b"x",
    }  # fmt: skip
    small = {name: model[name] for name in SMALL}
    models = {
        "org/model": Repo(model | others, revisions=("main", "v1")),
        "org/gated": Repo(model, is_gated=True),
        "org/private": Repo(model, token="hf_secret"),
        "org/bin": Repo(small | {"pytorch_model.bin": b"x"}),
        "org/gguf": Repo({"model.gguf": b"x"}),
        "org/gpt2": Repo(small | {"config.json": b'{"model_type": "gpt2"}'}),
        "org/cut": Repo(model | {"model.safetensors": b"x" * 100}, breaks_off=True),
    }
    for name in ("value", "teacher", "reference", "reward"):
        models[f"org/{name}"] = Repo(model | {"README.md": name.encode()}, revisions=("main", "v1"))
    with serve_hub(models) as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(CONFIG.replace("RUNS", str(tmp_path / "runs")))
    (tmp_path / "task.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def megarl(
    folder: Path, hub: Hub, *commands: list[str], **environ: str
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command."""
    process = start(folder, hub, *commands, **environ)
    return finish(process)


def start(folder: Path, hub: Hub, *commands: list[str], **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        env=hub.env(folder / "home", **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == "", "something bypassed sys.stderr"
    return [tuple(result) for result in json.loads(out)]


def downloaded(hub: Hub) -> list[str]:
    """Files whose bytes were sent."""
    return sorted(path.split("/resolve/")[1].partition("/")[2] for verb, path in hub.requests
                  if verb == "GET" and "/resolve/" in path)  # fmt: skip


def test_a_plan_and_a_dry_run_need_the_small_files_once(folder: Path, hub: Hub) -> None:
    commit = hub.repos["models"]["org/model"].commit
    dry_run = ["train", "c.yaml", "--dry-run"]
    commands = (
        ["plan", "c.yaml", "--weights", "--json"],
        dry_run,
        [*dry_run, f"model.revision={commit}"],
        [*dry_run, "model.trust_remote_code=true"],
        ["train", "c.yaml", "run.dir=c.yaml"],  # which cannot be created
    )
    plan, dry, pinned, _trusted, last = results = megarl(folder, hub, *commands)
    assert [code for code, _out, _err in results] == [0, 0, 0, 0, 2]
    assert (
        plan[2] == f"megarl: org/model (main) is commit {commit}\n"
        and json.loads(plan[1])["model"] == "qwen3"
    )
    assert f"path: org/model\n  revision: {commit}\n" in dry[1] and dry[1] == pinned[1]
    assert "cannot write to c.yaml/run" in last[2]
    asked = [
        path.rpartition("/")[2]
        for verb, path in hub.requests
        if verb == "GET" and "/tree/" not in path
    ]
    small = sorted(asked[1:5])
    assert small == sorted(SMALL), "neither weights nor code nor what lies in subfolders"
    assert asked == [
        "main",
        *asked[1:5],
        "main",
        "main",
        "tokenizer_code.py",
        "main",
        "model.safetensors",
    ]
    assert not (folder / "runs").exists()


def test_without_the_hub_the_cache_serves(folder: Path, hub: Hub) -> None:
    dry_run, train = ["train", "c.yaml", "--dry-run"], ["train", "c.yaml"]
    private = [*dry_run, "model.path=org/private"]
    assert [
        code for code, _out, _err in megarl(folder, hub, dry_run, private, HF_TOKEN="hf_secret")
    ] == [0, 0]
    hub.requests.clear()
    absent = (
        [*dry_run, "model.path=org/gated"],
        [*dry_run, "model.revision=v1"],
        train,
    )  # of which the weights are

    cached, other, *refused = megarl(folder, hub, dry_run, private, *absent, HF_HUB_OFFLINE="1")
    assert (cached[0], other[0], hub.requests) == (0, 0, [])
    for code, out, err in refused:
        assert (code, out) == (2, "")
        assert (
            "and HF_HUB_OFFLINE is set; unset it, or run `hf download org/" in err.splitlines()[-1]
        )

    cached, *refused = megarl(folder, hub, dry_run, *absent, HF_ENDPOINT="http://127.0.0.1:9")
    assert (cached[0], hub.requests) == (0, [])
    for code, out, err in refused:
        assert (code, out) == (2, "")
        assert (
            "http://127.0.0.1:9 cannot be used" in err
            and "check network and HF_ENDPOINT" in err.splitlines()[-1]
        )


def test_each_mistake_is_one_line(folder: Path, hub: Hub) -> None:
    (folder / "empty").mkdir()
    cases: dict[tuple[str, ...], str] = {
        ("model.path=org/none",): f"neither local nor a model that {hub.base} shows you",
        ("model.path=org/gated",): "org/gated is gated; accept its terms",
        ("model.path=org/private",): "set HF_TOKEN if it is private",
        ("model.revision=v2",): "model.path=org/model has no revision v2; set model.revision to a branch",
        ("model.path=org/bin",): "org/bin has no *.safetensors on the hub",
        ("model.path=org/gguf",): "org/gguf has no config.json on the hub",
        ("model.path=org/gpt2",): "model_type='gpt2' is not supported",
        ("model.path=./model",): "model.path=model is not a directory",
        ("model.path=/no/model",): "model.path=/no/model is not a directory",
        ("model.path=~/no-model",): "no-model is not a directory; set it to the folder of a Hugging Face model, or",
        ("model.path=~nobody-here/model",): "model.path=~nobody-here/model is not a directory",
        ("model.path=a/b/c",): "model.path=a/b/c is not a directory",
        ("model.path=empty",): "model.path=empty has no config.json",
        ("model.path=./empty",): "a checkpoint becomes such a folder with `megarl convert empty OUT --to hf`",
        ("model.path=empty", "model.revision=v1"): "model.revision=v1 applies to a hub id, not to model.path=empty",
        ("model.path=null", "model.create={}", "model.revision=v1"): "applies to a hub id, not to model.create",
        ("teacher.model=org/none", DISTILL): f"teacher.model=org/none is neither local nor a model that {hub.base}",
        ("teacher.model=org/model@v2", DISTILL): "org/model has no revision v2; set its part after @ to a branch",
        ("teacher.model=org/gpt2", DISTILL): "model_type='gpt2' is not supported",
    }  # fmt: skip
    results = megarl(folder, hub, *(["train", "c.yaml", *overrides] for overrides in cases))
    for says, (code, out, err) in zip(cases.values(), results, strict=True):
        assert (code, out) == (2, ""), err
        assert says in err.splitlines()[-1]
        assert [line for line in err.splitlines() if " is commit " not in line] == err.splitlines()[
            -1:
        ]
    assert not (folder / "runs").exists() and "model.safetensors" not in downloaded(hub)


def test_a_download_that_breaks_off(folder: Path, hub: Hub) -> None:
    ((code, out, err),) = megarl(folder, hub, ["train", "c.yaml", "model.path=org/cut"])
    assert (code, out) == (2, "")
    assert "model.path=org/cut cannot be downloaded (" in err and err.endswith(
        "start again: complete files are kept\n"
    )


def test_a_cache_that_cannot_be_written(folder: Path, hub: Hub) -> None:
    """As on a disk that is full: no file may have more than 300 bytes."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([["plan", "c.yaml", "--weights"]])],
        cwd=folder,
        env=hub.env(folder / "home"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)),
        capture_output=True,
        text=True,
    )
    ((code, _out, err),) = json.loads(process.stdout)
    assert code == 2, err
    assert (
        f"the cache {folder / 'home'}/hub cannot be written" in err
        and "free space there, or set HF_HOME" in err
    )


def test_one_rank_of_a_node_asks_and_all_have_its_commit(folder: Path, hub: Hub) -> None:
    def rank(number: int) -> Any:
        ranks = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        dry_run = ["train", "c.yaml", "--dry-run", "parallel.tensor=1"]
        return start(folder, hub, dry_run, MASTER_PORT="1", MEGARL_JOB_ID=folder.name, **ranks)

    prefix = shm_prefix(folder.name, os.getpid())
    lock_shm(prefix)  # as a launcher does, so that no other job's start removes the record
    processes = [rank(0), rank(1)]
    (zero,), (one,) = (finish(process) for process in processes)
    asked = hub.requests.count(("GET", "/api/models/org/model/revision/main"))
    assert (zero[0], one[0], asked, downloaded(hub)) == (0, 0, 1, sorted(SMALL))
    assert zero[1] == one[1] and " is commit " in zero[2] and one[2] == "", "rank 0 prints"

    moved = hub.repos["models"]["org/model"]
    hub.repos["models"]["org/model"] = Repo({**moved.files, "README.md": b"new"})  # type: ignore[index]
    assert finish(rank(1))[0][1] == one[1], "a slow rank has the others' commit, not the newest"
    assert len(unlink_shm(prefix, lock=True)) == 2  # the lock, the record


def test_a_resumed_run_keeps_its_commit(folder: Path, hub: Hub) -> None:
    """Its reference model would otherwise change when somebody pushes to main."""
    dry_run = ["train", "c.yaml", "--dry-run"]
    old = hub.repos["models"]["org/model"]
    assert megarl(folder, hub, dry_run)[0][0] == 0
    run = folder / "runs" / "run"
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    (run / "config.yaml").write_text(f"model: {{path: org/model, revision: {old.commit}}}\n")
    hub.repos["models"]["org/model"] = new = Repo({**old.files, "README.md": b"new"})  # type: ignore[index]
    resume = f"checkpoint.resume={run / 'checkpoints' / 'step_1'}"
    (run / "checkpoints" / "step_1" / "metadata.json").touch()
    other = "run.name=other"
    overrides = ([], ["model.revision=main"], ["checkpoint.resume=never"], [resume, other], [other])
    results = megarl(folder, hub, *([*dry_run, *each] for each in overrides))
    commits = [re.findall(r"is commit (\w+)", err)[-1] for _code, _out, err in results]
    assert commits == [old.commit, new.commit, new.commit, old.commit, new.commit], results
    assert "org/model (main, when the run began) is commit" in results[0][2]


def test_other_models_are_downloaded_where_they_are_needed(folder: Path, hub: Hub) -> None:
    """The small files of all for a check, the weights for ranks that load them."""
    (folder / "eval.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    dry, evaluated, trained, refused = megarl(
        folder,
        hub,
        ["train", "c.yaml", *OTHERS, "--dry-run"],
        [
            "eval",
            "c.yaml",
            *OTHERS,
            "run.dir=c.yaml",
            "task.options={eval_file: eval.jsonl}",
        ],  # no folder
        ["train", "c.yaml", *OTHERS, "run.dir=c.yaml"],
        ["train", "c.yaml", *OTHERS, "teacher.model=org/bin"],
    )
    assert (dry[0], evaluated[0], trained[0]) == (0, 2, 2), dry[2] + evaluated[2] + trained[2]
    assert refused[0] == 2 and "teacher.model=org/bin has no *.safetensors on the hub" in refused[2]
    for section, name in (("critic", "value"), ("teacher", "teacher"), ("reference", "reference")):
        commit = hub.repos["models"][f"org/{name}"].commit
        assert f"{section}:\n  model: org/{name}@{commit}\n" in dry[1]
        asked = "v1" if section == "critic" else "main"
        assert (
            f"megarl: {section}.model=org/{name} ({asked}) is commit {commit}"
            in dry[2].splitlines()
        )
    assert f"path: org/reward@{hub.repos['models']['org/reward'].commit}\n" in dry[1]
    sent = [
        path.split("/resolve/")
        for verb, path in hub.requests
        if verb == "GET" and "/resolve/" in path
    ]
    names = [name.removeprefix("/org/") for name, file in sent if file.endswith(".safetensors")]
    assert names == ["model", "reward", "value", "teacher", "reference"], (
        "eval needs the first two alone"
    )


def test_other_models_keep_their_commits(folder: Path, hub: Hub) -> None:
    dry_run = ["train", "c.yaml", *OTHERS, "critic.model=org/value", "--dry-run"]
    ((code, out, err),) = megarl(folder, hub, dry_run)
    assert code == 0, err
    run, old = folder / "runs" / "run", dict(hub.repos["models"])
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    (run / "config.yaml").write_text(out.partition("\n\nmodel ")[0])
    for name, repo in old.items():
        hub.repos["models"][name] = Repo({**repo.files, "README.md": b"new " + name.encode()})  # type: ignore[index]
    (code, again, err), (_, newest, _) = megarl(
        folder, hub, dry_run, [*dry_run, "teacher.model=org/teacher@main"]
    )
    assert code == 0 and again == out, err
    assert "teacher.model=org/teacher (main, when the run began) is commit" in err
    assert f"org/teacher@{hub.repos['models']['org/teacher'].commit}" in newest


def test_another_path_drops_the_files_revision(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {path: org/model, revision: v1}\n")
    assert load_config(tmp_path / "c.yaml").model.revision == "v1"
    assert load_config(tmp_path / "c.yaml", ["model.path=org/other"]).model.revision is None
    assert (
        load_config(
            tmp_path / "c.yaml", ["model.revision=v3", "model.path=org/other"]
        ).model.revision
        == "v3"
    )
