"""Text to ids and back: a tokenizer made by `model.create`, one from bare files, and none at all."""

from __future__ import annotations

import json
import re

import pytest

from megarl.config.schema import Create
from megarl.data.collate import supervised_batch
from megarl.data.tokenizer import TokenIds, load_tokenizer
from megarl.launch.random_model import create_model
from megarl.types import Prompt

EOS = 2  # of a made model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return create_model(Create(layers=1, hidden=16, heads=2, kv_heads=1), tmp_path_factory.mktemp("models"))


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
    assert whole == "<|system|>Add.<|user|>1 + 1<|assistant|>"  # up to where the answer begins, each token once
    assert tokenizer.encode_prompt(messages, "plain") == tokenizer.encode_prompt("Add.\n1 + 1", "plain")


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


def test_plain_tokenizers_file_alone(made, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_prompt("1 + 1", None) == load_tokenizer(made).encode_prompt("1 + 1", "plain")
    assert tokenizer.encode_answer("2")[-1] == EOS
    with pytest.raises(ValueError, match="no chat template; use plain"):
        tokenizer.encode_prompt("1 + 1", "chat")


def test_no_tokenizer_means_texts_are_ids(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 67, "eos_token_id": 2}')
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, TokenIds) and tokenizer.eos == (2,)
    assert tokenizer.encode_prompt("5 17 3", None) == (5, 17, 3)
    assert tokenizer.decode([5, 17]) == "5 17"
    with pytest.raises(ValueError, match=re.escape("token ids 0..66 separated by spaces, not '67'")):
        tokenizer.encode_prompt("5 67", "plain")
    with pytest.raises(ValueError, match=re.escape("use task.template: plain")):
        tokenizer.encode_prompt("5", "chat")


def test_examples_learn_the_answer_and_its_end_only():
    prompts = [Prompt(0, (10, 11, 12), "", "20 21"), Prompt(1, (13,), "", "22")]
    batch = supervised_batch(TokenIds((2,), 67), prompts)
    assert batch.tokens.tolist() == [10, 11, 12, 20, 21, 2, 13, 22, 2]
    assert batch.labels[batch.mask].tolist() == [20, 21, 2, 22, 2]
    assert batch.num_rows == 2 and batch.temperature == 1.0


def test_an_example_without_an_answer():
    with pytest.raises(ValueError, match=re.escape("problem 4 ('why?') has no answer")):
        supervised_batch(TokenIds((2,), 67), [Prompt(4, (10,), "why?")])
