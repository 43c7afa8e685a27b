"""Outside formats: files, families' names and configs, tokenizers."""
