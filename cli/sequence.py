from formats.tokenizer import Row as Sequence  # noqa: F401
