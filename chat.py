"""The interactive chat: read a line, show the answer, remember both.

It owns the conversation and receives what it drives: no model, no device, no step of its own.

    python generate.py --compile --interactive
"""

from collections.abc import Callable


def chat(tokenizer, answer: Callable[[list[int]], str], limit: int,
         note: Callable[[str], None]) -> None:
    """Converse until the input ends. A model without a chat template continues each line instead.

    answer(ids) shows and returns the answer to a prompt; limit: the longest prompt, in tokens.
    """
    plain = tokenizer.chat_template is None
    note("no chat template: each line is continued as it is" if plain else
         "type a message; an empty line starts a new conversation, Ctrl-D ends")
    messages = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not line.strip():
            messages = []
            continue
        messages.append(dict(role="user", content=line))
        if plain:
            ids = tokenizer.encode(line)
        else:                                      # the template writes the special tokens itself
            ids = tokenizer.encode(tokenizer.render(messages), bos=False)
        if len(ids) > limit:
            note(f"{len(ids)} tokens do not fit into {limit}: starting a new conversation")
            messages = []
            continue
        messages.append(dict(role="assistant", content=answer(ids)))
        if plain:
            messages = []
