"""The user's cache on disk: compiled operations and prepared weights."""
