from tokenizers import Tokenizer, processors


def make(folder):
    file = str(folder / "model" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    ends = {name: tokenizer.token_to_id(name) for name in ("<s>", "<|endoftext|>", "<|im_end|>")}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[*ends.items()]
    )
    tokenizer.save(file)
