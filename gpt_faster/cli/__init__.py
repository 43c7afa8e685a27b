"""The commands: flags, options, prompt files, chat, evaluation, quantization."""
