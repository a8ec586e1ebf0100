"""Transformers loads a random model of every family, and the same section always gives the same bytes."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.commands.random_model import create_model
from megarl.config.schema import Create

MADE = [
    Create(family="qwen2"),
    Create(family="qwen3", tied=False, phrases=("Calculate ",)),
    Create(family="qwen3_moe", experts=4),
    Create(family="llama", head_dim=32, tied=False),
    Create(family="mixtral", experts=4, tied=False),
    Create(family="gpt_oss", experts=4, tied=False),
    Create(family="deepseek_v3", experts=4, tied=False),
    Create(family="glm4_moe", experts=4, tied=False),
]


@pytest.mark.parametrize("create", MADE, ids=lambda create: create.family)
def test_transformers_reads_all_of_it(tmp_path: Path, create: Create) -> None:
    folder = create_model(create, tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = 'Calculate 3 + 4.\n\tAnswer: "7" ~Z{}'
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text) - sum(len(phrase) - 1 for phrase in create.phrases)
    assert (
        tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    )
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|user|>1+1<|assistant|>"
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    assert logits.shape[-1] == model.config.vocab_size == len(tokenizer)
    entropy = torch.distributions.Categorical(logits=logits.float()).entropy().mean()
    assert 0.5 * torch.tensor(len(tokenizer)).log() < entropy, (
        "a degenerate policy would sample one text only"
    )
    assert logits.std() > 0.3, "a flat one would not be moved by its weights"


def test_a_sections_bytes_never_change(tmp_path: Path) -> None:
    """Of config.json and of the weights, for the sections above."""
    digests = {
        create.family: tuple(
            hashlib.sha256((create_model(create, tmp_path) / name).read_bytes()).hexdigest()[:12]
            for name in ("config.json", "model.safetensors")
        )
        for create in MADE
    }
    assert digests == {
        "qwen2": ("9281bdbef87a", "fa801fe13dda"),
        "qwen3": ("8e57dbcb75a9", "9da82a0695d5"),
        "qwen3_moe": ("9dd39f347409", "b9330c2ad8cf"),
        "llama": ("15701335a2c9", "9bb727f39980"),
        "mixtral": ("a39e5f140d6d", "d952009f1814"),
        "gpt_oss": ("a9fd74ea8cda", "f27f75925d2f"),
        "deepseek_v3": ("912971232c00", "dc05ec484a2b"),
        "glm4_moe": ("c873f069982c", "72a425bfb825"),
    }


def test_the_same_section_gives_the_same_bytes_also_when_made_twice_at_once(tmp_path: Path) -> None:
    create = Create(vocab=67, tokenizer="none")

    def fingerprint(root: Path) -> str:
        folder = create_model(create, root)
        return hashlib.sha256(
            b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
        ).hexdigest()

    with ThreadPoolExecutor(4) as pool:
        found = set(
            pool.map(fingerprint, [tmp_path / "a", tmp_path / "a", tmp_path / "a", tmp_path / "b"])
        )
    assert len(found) == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == [
        path.name for path in (tmp_path / "b").iterdir()
    ]
    assert create_model(create.model_copy(update={"seed": 1}), tmp_path / "a").name not in {
        path.name for path in (tmp_path / "b").iterdir()
    }
    assert "tokenizer.json" not in {
        path.name for path in create_model(create, tmp_path / "a").iterdir()
    }
