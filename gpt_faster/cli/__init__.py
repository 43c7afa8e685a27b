"""What a command line needs and nobody else: flags, options, prompts in a file, chat, reports."""
