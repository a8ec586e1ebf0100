"""A byte-level tokenizer with the special tokens of several families; a report brings its chat_template.jinja."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[THINK]",
        "[/THINK]",
    ),
    *(
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
    ),
)
PLAIN = ("<think>", "</think>")


def make(folder):
    names = [*SPECIAL, *PLAIN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in (*SPECIAL, *PLAIN):
        tokenizer.add_tokens([AddedToken(name, special=name in SPECIAL, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "vocab_size": len(names)})
    )
