"""What the commands are made of: flags, sessions, devices, batches of prompts, chat."""
