"""A conversion there and back is the model again, bit for bit; what is wrong is named, and gets no name itself."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megarl import cli
from megarl.checkpoint.torch_dist import MegatronTarget
from megarl.commands import conversion as command
from megarl.commands.random_model import create_model
from megarl.config.schema import Create
from megarl.layout import Parallel
from megarl.models.registry import hf_shapes, read_model
from megarl.types import CheckFailed

MODELS = {
    "qwen3": {"family": "qwen3", "tied": True},
    "qwen2": {"family": "qwen2", "tied": False, "heads": 4, "kv_heads": 2},
    "llama": {"family": "llama", "tied": False, "kv_heads": 4},
    "qwen3_moe": {"family": "qwen3_moe", "tied": False, "experts": 4, "moe_intermediate": 16},
    "mixtral": {"family": "mixtral", "tied": False, "experts": 4, "moe_intermediate": 16},
    "gpt_oss": {"family": "gpt_oss", "tied": False, "experts": 4, "moe_intermediate": 16},
    # these two with a layer of multi-token prediction
    "deepseek_v3": {"family": "deepseek_v3", "tied": False, "experts": 4, "moe_intermediate": 16},
    "glm4_moe": {"family": "glm4_moe", "tied": False, "experts": 4, "moe_intermediate": 16},
}
SIZES = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 67}
TP2_PP2_EP2 = Parallel(tensor=2, pipeline=2, expert=2)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> Path:
    """Random in every tensor, in bf16 but for the norms; the names are shuffled over three files."""
    made = create_model(Create(**SIZES | MODELS[request.param]), tmp_path_factory.mktemp("models"))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    config = json.loads((made / "config.json").read_text())
    if "num_nextn_predict_layers" in config:
        (made / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    for name, size in hf_shapes(read_model(made), mtp=True).items():
        dtype = (
            torch.float32 if name.endswith(("norm.weight", "correction_bias")) else torch.bfloat16
        )
        tensors[name] = torch.randn(size, generator=generator).to(dtype)
    (made / "model.safetensors").unlink()
    names = sorted(tensors, key=lambda name: name[::-1])
    where = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        held = {name: tensors[name] for name in names[number::3]}
        save_file(held, made / file)
        where |= dict.fromkeys(held, file)
    (made / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    return made


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    return create_model(Create(**SIZES | MODELS["qwen3_moe"]), tmp_path_factory.mktemp("moe"))


def run(
    source: Path,
    target: Path,
    to: str,
    sizes: Parallel = Parallel(),  # noqa: B008 (it is frozen)
    file_bytes: int = 1 << 30,
) -> str:
    return command.run_convert(
        source, target, to, sizes, config=None, file_bytes=file_bytes, interactive=False
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same(one: Path, other: Path) -> None:
    before, after = tensors_of(one), tensors_of(other)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


def test_there_and_back(model, tmp_path):
    """In one layout's files, then another's, then HF in several files: each tensor keeps its values and its dtype."""
    run(model, tmp_path / "one", "megatron", Parallel(), 20_000)
    run(tmp_path / "one", tmp_path / "other", "megatron", Parallel(tensor=2, pipeline=3))
    said = run(tmp_path / "other", tmp_path / "back", "hf", file_bytes=20_000)
    assert_same(model, tmp_path / "back")
    assert "verified" in said
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert len(set(index.values())) > 1
    for name, file in index.items():
        assert name in load_file(tmp_path / "back" / file)
    sums = [
        sorted((tmp_path / made / "checksums.megarl").read_text().split("\n"))
        for made in ("one", "other", "back")
    ]
    assert sums[0] == sums[1] == sums[2], "one checksum a tensor, whatever holds it"
    assert (tmp_path / "back" / "tokenizer.json").is_file() and (
        tmp_path / "one" / "config.json"
    ).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "other", "back"}, (
        "no staging is left"
    )


def test_layers_of_multi_token_prediction_are_whole_or_said_to_be_absent(tmp_path):
    made = create_model(Create(**SIZES | MODELS["glm4_moe"]), tmp_path)
    (made / "config.json").write_text(
        json.dumps(json.loads((made / "config.json").read_text()) | {"num_nextn_predict_layers": 1})
    )
    assert "without multi-token prediction layers" in run(made, tmp_path / "without", "megatron")
    assert "without multi-token prediction layers" in run(
        tmp_path / "without", tmp_path / "back", "hf"
    )
    tensors = load_file(made / "model.safetensors")
    tensors["model.layers.3.enorm.weight"] = torch.ones(SIZES["hidden"])
    save_file(tensors, made / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.3\."):
        run(made, tmp_path / "part", "megatron")


def test_dtypes_that_megatron_cannot_keep_apart_are_refused(moe, tmp_path):
    os.system(f"cp -r {moe} {tmp_path / 'mixed'}")
    key = "model.layers.1.self_attn.k_proj.weight"
    edited(tmp_path / "mixed", lambda held: held.update({key: held[key].to(torch.bfloat16)}))
    with pytest.raises(
        ValueError, match=r"k_proj.weight is torch.bfloat16 and .*q_proj.weight torch.float32"
    ):
        run(tmp_path / "mixed", tmp_path / "out", "megatron")
    assert not (tmp_path / "out").exists()


def test_files_are_those_of_a_stage_and_an_expert_rank(moe, tmp_path):
    run(moe, tmp_path / "out", "megatron", Parallel(tensor=2, pipeline=3, expert=2))
    held = defaultdict(set)  # file -> (stage, which half of the experts)
    for index, stored in FileSystemReader(tmp_path / "out").read_metadata().storage_data.items():
        if (
            layer := re.match(r"decoder\.layers\.(\d)\.", index.fqn)
        ) and "_extra_state" not in index.fqn:
            half = index.offset[0] // 2 if ".experts." in index.fqn else None
            held[stored.relative_path].add((int(layer[1]), half))
    expected = [{(stage, half)} for stage in range(3) for half in (None, 0, 1)]
    assert held == {f"__{number}_0.distcp": members for number, members in enumerate(expected)}
    assert held.keys() == {file.name for file in (tmp_path / "out").glob("*.distcp")}


def damage_truncate(folder: Path) -> tuple[str, ...]:
    file = sorted(folder.glob("*.safetensors"))[-1]
    os.truncate(file, file.stat().st_size - 4)
    return file.name, "file not fully covered", "copy it again"


def edited(folder: Path, edit) -> None:
    held = load_file(folder / "model.safetensors")
    edit(held)
    save_file(held, folder / "model.safetensors")


def damage_missing(folder: Path) -> tuple[str, ...]:
    edited(folder, lambda held: held.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    return "model.safetensors", "model.layers.1.mlp.experts.2.up_proj.weight"


def damage_extra(folder: Path) -> tuple[str, ...]:
    edited(folder, lambda held: held.update({"model.layers.3.mlp.gate.weight": torch.zeros(2)}))
    return "model.safetensors", "model.layers.3.mlp.gate.weight"


def damage_shape(folder: Path) -> tuple[str, ...]:
    edited(folder, lambda held: held.update({"model.norm.weight": torch.zeros(31)}))
    return "model.safetensors", "model.norm.weight", "(31,)", "(32,)"


def damage_header(folder: Path) -> tuple[str, ...]:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json, is it?")
    return ("model.safetensors",)


DAMAGES = [damage_truncate, damage_missing, damage_extra, damage_shape, damage_header]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_source_is_refused_by_name(moe, tmp_path, damage):
    broken = tmp_path / "broken"
    os.system(f"cp -r {moe} {broken}")
    named = damage(broken)
    with pytest.raises(ValueError) as refused:
        run(broken, tmp_path / "out", "megatron")
    assert all(text in str(refused.value) for text in named), refused.value
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_refused_by_name(moe, tmp_path):
    run(moe, tmp_path / "good", "megatron")
    cases = {
        "__0_0.distcp": lambda file: os.truncate(file, file.stat().st_size - 10),
        "__1_0.distcp": Path.unlink,
    }
    for name, damage in cases.items():
        broken = tmp_path / f"without{name}"
        os.system(f"cp -r {tmp_path / 'good'} {broken}")
        damage(broken / name)
        with pytest.raises(
            ValueError,
            match=rf"{name} has .* bytes, but (decoder|output_layer).* truncated or missing",
        ):
            run(broken, tmp_path / "out", "hf")
    places = FileSystemReader(tmp_path / "good").read_metadata().storage_data
    (embedding,) = (
        place.offset for index, place in places.items() if index.fqn.startswith("embedding.")
    )
    for at, error, said in (
        (0, ValueError, "cannot be read"),
        (2000, CheckFailed, "since the folder was created"),
    ):
        broken = tmp_path / f"flipped{at}"
        os.system(f"cp -r {tmp_path / 'good'} {broken}")
        raw = bytearray((broken / "__0_0.distcp").read_bytes())
        raw[embedding + at] ^= 1
        (broken / "__0_0.distcp").write_bytes(raw)
        with pytest.raises(error, match=rf"(decoder|embedding|model)\.\S+ .*{said}"):
            run(broken, tmp_path / "out", "hf")
    other = json.loads((broken / "config.json").read_text()) | {"hidden_size": 64}
    (broken / "config.json").write_text(json.dumps(other))
    with pytest.raises(
        ValueError,
        match=r"\.metadata: embedding\.\S+ has shape \(\d+, 32\), .*requires \(\d+, 64\)",
    ):
        run(broken, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


class Runs:
    """Pickled, it is a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def test_a_crafted_checkpoint_runs_nothing_and_exits_with_2(moe, tmp_path, capsys):
    run(moe, tmp_path / "good", "megatron")
    code = pickle.dumps(Runs(f"touch {tmp_path}/ran"))
    (tmp_path / "good" / "common.pt").write_bytes(code)  # is not read
    run(tmp_path / "good", tmp_path / "back", "hf")
    (tmp_path / "good" / ".metadata").write_bytes(code)
    assert cli.main(["convert", str(tmp_path / "good"), str(tmp_path / "out"), "--to", "hf"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{tmp_path}/good/.metadata refers to posix.system" in error
    assert not (tmp_path / "out").exists() and not (tmp_path / "ran").exists()


def test_a_crafted_record_of_an_interrupted_conversion_runs_nothing(moe, tmp_path, monkeypatch):
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(MegatronTarget, "finish", Mock(side_effect=KeyboardInterrupt))
        run(moe, tmp_path / "out", "megatron")
    record, *_ = (tmp_path / ".out.part" / ".records").glob("*.pickle")
    record.write_bytes(pickle.dumps(Runs(f"touch {tmp_path}/ran")))
    with pytest.raises(ValueError, match=r"refers to posix\.system"):
        run(moe, tmp_path / "out", "megatron")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_a_full_disk_names_the_file_and_the_next_run_goes_on(moe, tmp_path, to):
    """A limit on a file's size fails writes as a full disk does: with an OSError in the middle of a tensor."""
    source = moe
    if to == "hf":
        run(moe, source := tmp_path / "source", "megatron")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(CheckFailed, match=r"/\.out\.part/\S+: .*File too large.*; fix this"):
            run(source, tmp_path / "out", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()
    run(source, tmp_path / "out", to)
    run(tmp_path / "out", tmp_path / "again", "hf") if to == "megatron" else None
    assert_same(moe, tmp_path / ("again" if to == "megatron" else "out"))


def test_a_disk_that_would_be_full_is_refused_before_the_first_byte(moe, tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    few = os.statvfs_result([*real[:4], 20_000 // real.f_frsize, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: few)
    with pytest.raises(
        CheckFailed, match=r"/\.out\.part: not enough disk space: .* \d+ bytes, \d+ are free"
    ):
        run(moe, tmp_path / "out", "megatron")
    assert not list((tmp_path / ".out.part").glob("*.distcp"))


DIES = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from megarl.commands import conversion as convert
from megarl.layout import Parallel

@contextmanager
def bar(total, interactive):
    seen = [0]
    def progress(what, nbytes):
        seen[0] += nbytes
        if seen[0] > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)
    yield progress

convert._bar = bar
source, target, to = sys.argv[1:]
convert.run_convert(Path(source), Path(target), to, Parallel(), config=None, file_bytes=20_000, interactive=False)
"""


@pytest.mark.long
@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_killed_in_the_middle_it_goes_on(moe, tmp_path, to):
    source = moe
    if to == "hf":
        run(moe, source := tmp_path / "source", "megatron")
    command = [sys.executable, "-W", "ignore", "-c", DIES, str(source), str(tmp_path / "out"), to]
    assert subprocess.run(command, timeout=200).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    whole = list((tmp_path / ".out.part" / ".records").glob("*.pickle"))
    assert whole, "files that were whole are known"
    kept = {file.name: (file.parent.parent / file.stem).stat().st_ino for file in whole}
    said = run(source, tmp_path / "out", to, file_bytes=20_000)
    assert "of it from an interrupted run" in said
    assert all(
        (tmp_path / "out" / name.removesuffix(".pickle")).stat().st_ino == inode
        for name, inode in kept.items()
    )
    if to == "megatron":
        run(tmp_path / "out", tmp_path / "again", "hf")
    assert_same(moe, tmp_path / ("again" if to == "megatron" else "out"))


def test_another_source_starts_afresh(moe, tmp_path):
    staging = tmp_path / ".out.part"
    (staging / ".records").mkdir(parents=True)
    (staging / ".records" / "identity.json").write_text("{}")
    (staging / "model-00009-of-00009.safetensors").write_bytes(b"x")
    run(moe, tmp_path / "out", "megatron")
    assert not (tmp_path / "out" / "model-00009-of-00009.safetensors").exists()


def test_what_was_written_wrong_never_gets_its_name(moe, tmp_path, monkeypatch):
    write = MegatronTarget.write

    def swapped(self, folder, file, params):
        def changed():
            for param, flat in params:
                if param == "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight":
                    # two rows swapped: plain sums agree
                    flat = flat.view(-1, 16)[[1, 0, *range(2, 32)]].flatten()
                yield param, flat

        return write(self, folder, file, changed())

    with monkeypatch.context() as patch:
        patch.setattr(MegatronTarget, "write", swapped)
        with pytest.raises(
            CheckFailed,
            match=r"model\.layers\.1\.mlp\.experts\.3\.down_proj\.weight differ from the",
        ):
            run(moe, tmp_path / "out", "megatron")
    assert not (tmp_path / "out").exists()
    run(moe, tmp_path / "out", "megatron")


def test_what_cannot_be_done_is_said(moe, tmp_path):
    with pytest.raises(ValueError, match="already exists; remove it"):
        run(moe, moe, "megatron")
    for sizes, said in (
        (Parallel(tensor=8), "num_key_value_heads=2 is not divisible by --tp 8"),
        (Parallel(pipeline=4), "layers=3 cannot fill pipeline x virtual_pipeline = 4 x 1"),
        (Parallel(expert=3), "--ep 3 does not divide the model's 4 experts"),
    ):
        with pytest.raises(ValueError, match=said):
            run(moe, tmp_path / "out", "megatron", sizes)
    with pytest.raises(ValueError, match="does not apply; remove --tp, --pp and --ep"):
        run(moe, tmp_path / "out", "hf", Parallel(tensor=2))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--config DIR"):
        run(tmp_path / "empty", tmp_path / "out", "hf")
