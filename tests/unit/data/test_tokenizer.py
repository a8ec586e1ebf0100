"""Text to ids and back: a tokenizer made by `model.create`, those in other formats, and none at all."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from megarl.commands.random_model import create_model
from megarl.config.schema import Create, Task
from megarl.data.collate import supervised_batch
from megarl.data.conversations import example_encoder
from megarl.data.tasks import Problem
from megarl.data.tokenizer import TokenIds, check_tokenizer, load_tokenizer
from megarl.platform import env as packages
from megarl.types import Prompt

EOS = 2  # of a made model
TEXTS = [
    f"the {i} quick brown foxes jump over {7 * i} lazy dogs, and {i + 3} more = {i * i}."
    for i in range(300)
]
TEXT = "the 12 quick foxes = 144.\n a"
CODE = """
from transformers import PreTrainedTokenizer
class Digits(PreTrainedTokenizer):
    vocab_size = 10
    def get_vocab(self): return {str(n): n for n in range(10)}
    def _tokenize(self, text): return list(text)
    def _convert_token_to_id(self, token): return int(token)
    def _convert_id_to_token(self, index): return str(index)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return create_model(
        Create(layers=1, hidden=16, heads=2, kv_heads=1), tmp_path_factory.mktemp("models")
    )


def test_round_trip_of_plain_text(made):
    tokenizer = load_tokenizer(made)
    ids = tokenizer.encode_prompt("Calculate 12 + 34.", "plain")
    assert tokenizer.decode(ids) == "Calculate 12 + 34."


def test_chat_is_the_default_where_there_is_a_template(made):
    tokenizer = load_tokenizer(made)
    assert tokenizer.encode_prompt("1 + 1", None) == tokenizer.encode_prompt("1 + 1", "chat")
    messages = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"})
    ids = tokenizer.encode_prompt(messages, "chat")
    whole = tokenizer.inner.decode(ids)
    # up to where the answer begins, each token once
    assert whole == "<|system|>Add.<|user|>1 + 1<|assistant|>"
    assert tokenizer.encode_prompt(messages, "plain") == tokenizer.encode_prompt(
        "Add.\n1 + 1", "plain"
    )


def test_an_answer_ends_and_the_end_is_not_text(made):
    tokenizer = load_tokenizer(made)
    ids = tokenizer.encode_answer("46")
    assert ids[-1] == EOS and tokenizer.decode(ids) == "46"


def test_every_end_is_known(made, tmp_path):
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, ends in (("generation_config.json", [5, 7]), ("config.json", 6)):
        values = json.loads((made / name).read_text()) | {"eos_token_id": ends}
        (tmp_path / name).write_text(json.dumps(values))
    assert load_tokenizer(tmp_path).eos == (EOS, 5, 6, 7)


@pytest.mark.parametrize("ends", ["</s>", [[1]], [1.5], {"a": 1}])
def test_an_end_that_is_no_token_is_refused(made, tmp_path, ends):
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ValueError, match=r"eos_token_id=.* is invalid; it must be a token id"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "[" * 100_000, "{"])
def test_a_file_of_settings_that_is_no_object_is_named(made, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json (is not JSON|contains a list)") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_plain_tokenizers_file_alone(made, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_prompt("1 + 1", None) == load_tokenizer(made).encode_prompt(
        "1 + 1", "plain"
    )
    assert tokenizer.encode_answer("2")[-1] == EOS
    with pytest.raises(ValueError, match="no chat template; use plain"):
        tokenizer.encode_prompt("1 + 1", "chat")


def write(folder: Path, family: str, **tokenizer_config: object) -> Path:
    (folder / "config.json").write_text(
        json.dumps({"model_type": family, "vocab_size": 512, "eos_token_id": EOS})
    )
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def test_a_sentencepiece_model(tmp_path):
    sentencepiece, written = pytest.importorskip("sentencepiece"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=written, model_type="bpe", vocab_size=300, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
    tokenizer = load_tokenizer(write(tmp_path, "llama", tokenizer_class="LlamaTokenizer", **names))
    expected = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()).encode(TEXT)
    assert list(tokenizer.encode_prompt(TEXT, "plain")) == expected
    assert tokenizer.decode(expected) == TEXT and tokenizer.encode_answer("4")[-1] == EOS


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model"])
def test_a_tiktoken_file(tmp_path, name):
    pytest.importorskip("tiktoken")
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b"qu"]
    lines = [base64.b64encode(token) + b" %d\n" % index for index, token in enumerate(tokens)]
    (tmp_path / name).write_bytes(b"".join(lines))
    tokenizer = load_tokenizer(write(tmp_path, "llama"))
    assert tokenizer.encode_prompt("the qua", "plain") == (257, 32, 258, 97)
    assert tokenizer.decode(tokenizer.encode_prompt(TEXT, "plain")) == TEXT


def test_vocabulary_and_merges(tmp_path):
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=400)
    trained.save_model(str(tmp_path))
    tokenizer = load_tokenizer(write(tmp_path, "qwen2"))
    assert tokenizer.decode(tokenizer.encode_prompt(TEXT, "plain")) == TEXT
    assert list(tokenizer.encode_prompt(" quick", "plain")) == trained.encode(" quick").ids


@pytest.mark.parametrize(
    ("content", "missing", "install"),
    [
        (
            b"\n\x0e",
            {"sentencepiece", "google.protobuf"},
            "SentencePiece: pip install sentencepiece",
        ),
        (b"\n\x0e", {"google.protobuf"}, "protobuf: pip install protobuf"),
        (b"IQ== 0\n", {"tiktoken"}, "tiktoken: pip install tiktoken"),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, content, missing, install):
    (tmp_path / "tokenizer.model").write_bytes(content)
    check_tokenizer(tmp_path, trust_remote_code=False)
    monkeypatch.setattr(packages, "is_installed", lambda name: name not in missing)
    with pytest.raises(ValueError, match=f"tokenizer.model needs {install}$"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "auto_map", [{"AutoTokenizer": ["code.Digits", None]}, ["code.Digits", None]]
)
def test_the_models_code_runs_only_if_trusted(tmp_path, monkeypatch, auto_map):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{CODE}")
    write(folder, "llama", auto_map=auto_map, tokenizer_class="Digits")
    with pytest.raises(
        ValueError,
        match=r"the tokenizer is code \(.*code.Digits.*\); set model.trust_remote_code=true",
    ):
        load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()
    assert load_tokenizer(folder, trust_remote_code=True).encode_prompt("420", "plain") == (4, 2, 0)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("tokenizer.json", "the tokenizer cannot be loaded"),
        ("generation_config.json", "config.json is not JSON"),
    ],
)
def test_a_damaged_file_is_named(made, tmp_path, file, says):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text('{"model": ')
    with pytest.raises(ValueError, match=says):
        load_tokenizer(tmp_path)


def test_no_tokenizer_means_texts_are_ids(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 67, "eos_token_id": 2}')
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, TokenIds) and tokenizer.eos == (2,)
    assert tokenizer.encode_prompt("5 17 3", None) == (5, 17, 3)
    assert tokenizer.decode([5, 17]) == "5 17"
    with pytest.raises(
        ValueError, match=re.escape("token ids 0..66 separated by spaces, not '67'")
    ):
        tokenizer.encode_prompt("5 67", "plain")
    with pytest.raises(ValueError, match=re.escape("use task.template: plain")):
        tokenizer.encode_prompt("5", "chat")


def test_examples_learn_the_answer_and_its_end_only():
    prompts = [Prompt(0, (10, 11, 12), "", "20 21"), Prompt(1, (13,), "", "22")]
    batch = supervised_batch(TokenIds((2,), 67), prompts)
    assert batch.tokens.tolist() == [10, 11, 12, 20, 21, 2, 13, 22, 2]
    assert batch.labels[batch.mask].tolist() == [20, 21, 2, 22, 2]
    assert batch.num_rows == 2 and batch.temperature == 1.0


def test_an_example_without_an_answer_is_refused(made):
    encode = example_encoder(load_tokenizer(made), Task(), ("assistant",))
    with pytest.raises(
        ValueError, match=re.escape("has no answer, but stage: sft trains on answers")
    ):
        encode(Problem("why?"))
    with pytest.raises(ValueError, match="is a list, not one text"):
        encode(Problem("why?", ["a", "b"]))


def test_a_conversation_with_a_token_beyond_the_vocabulary(made):
    """Only what is written counts: a tokenizer may have more tokens than the model."""
    tokenizer = load_tokenizer(made)
    tokenizer.inner.add_tokens(["<tool>"])
    vocab = tokenizer.vocab
    encode = example_encoder(tokenizer, Task(), ("assistant",))
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert encode(Problem(tuple(turns)))
    with pytest.raises(ValueError, match=rf"'<tool>' as {vocab}, .*vocab_size={vocab};"):
        encode(Problem((turns[0], turns[1] | {"content": "<tool>"})))
