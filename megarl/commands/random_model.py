"""Writes the random Hugging Face model of `model.create` to disk: config, weights, tokenizer.

    Create --hash--> <run.dir>/.models/<hash>/model.safetensors, tokenizer*.json
                                              config.json, generation_config.json

The folder is written under a temporary name and then renamed, so it is complete or absent, even if
two runs create it at the same time. This module does not import torch.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.load import changed
from megarl.config.random_model import BOS, EOS, PAD, SPECIAL, UNK, characters, hf_config
from megarl.config.schema import Config, Create
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.models.registry import hf_shapes, parse_model
from megarl.models.shape import Settings
from megarl.processes.files import write_json

FORMAT = 1  # increment if the same section must produce different bytes
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def materialize_model(config: Config) -> Config:
    """Creates the model of `model.create`, if set; returns the config with its `model.path`."""
    if not config.model.create:
        return config
    folder = create_model(config.model.create, Path(config.run.dir) / ".models")
    return changed(config, "model", path=str(folder), create=None)


def create_model(create: Create, root: Path) -> Path:
    """Writes the model unless it exists; returns its folder, named by a hash of `create`."""
    text = json.dumps([FORMAT, create.model_dump(mode="json")], sort_keys=True)
    folder = root / hashlib.sha256(text.encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}.", dir=root, ignore_cleanup_errors=True
    ) as name:
        staging = Path(name)
        values = hf_config(create)
        _write_settings(staging, create, values)
        _write_weights(staging / "model.safetensors", values, create.seed)
        staging.chmod(0o755)
        try:
            staging.rename(folder)
        except OSError:  # another run was faster, and wrote the same bytes
            if not folder.is_dir():
                raise
    return folder


def random_tokenizer(create: Create) -> Tokenizer:
    """Returns the tokenizer of the model that `create_model` writes."""
    with tempfile.TemporaryDirectory() as folder:
        _write_settings(Path(folder), create, hf_config(create))
        return load_tokenizer(folder)


def _write_settings(folder: Path, create: Create, values: Settings) -> None:
    """Writes the config, the generation config and the tokenizer."""
    write_json(folder / "config.json", values)
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True}
    write_json(folder / "generation_config.json", generation)
    if create.tokenizer == "characters":
        _write_tokenizer(folder, create)


def _write_weights(file: Path, values: Settings, seed: int) -> None:
    """Writes normally distributed weights with standard deviation 1/sqrt(fan-in).

    With this scale, hidden states keep unit variance, and logits vary between tokens.
    """
    from safetensors.numpy import save_file

    random = np.random.Generator(np.random.PCG64(seed))
    tensors = {}
    shapes = hf_shapes(parse_model(values, "model.create"))
    for name, size in sorted(shapes.items()):
        if name.endswith("norm.weight"):
            weights = np.ones(size)
        elif name.endswith("bias"):
            weights = 0.02 * random.standard_normal(size)
        else:
            # fan-in is the last axis of every matrix, even of a tied embedding
            weights = random.standard_normal(size) / size[-1] ** 0.5
        tensors[name] = weights.astype(np.float32)
    save_file(tensors, file, metadata={"format": "pt"})


def _write_tokenizer(folder: Path, create: Create) -> None:
    """Writes a tokenizer with one token per character or phrase: a byte-level BPE without merges.

    transformers rebuilds qwen2's tokenizer as byte-level, whatever the file contains.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    tokens = characters(create)
    # byte-level BPE represents control characters and the space as U+0100 + byte
    vocab = {}
    for index, token in enumerate(tokens):
        if len(token) == 1 and ord(token) <= 32:
            token = chr(256 + ord(token))
        vocab[token] = index
    tokenizer: Any = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=tokens[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in SPECIAL]
    phrases = [AddedToken(phrase, normalized=False) for phrase in create.phrases]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(phrases)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "TokenizersBackend",
            "pad_token": SPECIAL[PAD],
            "bos_token": SPECIAL[BOS],
            "eos_token": SPECIAL[EOS],
            "unk_token": SPECIAL[UNK],
            "model_max_length": create.max_position,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
