from tokenizers import Tokenizer, processors


def make(folder):
    file = str(folder / "model" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    start = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[start]
    )
    tokenizer.save(file)
