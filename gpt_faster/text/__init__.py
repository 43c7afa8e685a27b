"""Tokenizers other than tokenizer.json, chat templates, end-of-generation tokens."""
