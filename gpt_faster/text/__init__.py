"""Text to ids and back beyond tokenizer.json: other files, chat templates, end tokens."""
