"""/tokenize, /detokenize and /apply-template: the tokenizer and the template without the model.

They take the fields of vLLM's and llama.cpp's routes of these names, and answer with both's.

    routes = TextRoutes(preparer)
    routes.tokenize(TokenizeRequest(prompt="Hello"))           # {"tokens": […], "count": 1, …}
"""

from typing import Annotated

from pydantic import Field

from gpt_faster.server.prepare import RequestPreparer
from gpt_faster.server.protocol import ApiError, ChatRequest, Message, Strict
from gpt_faster.text.chat_template import encode_chat, render, special_tokens


class TokenizeRequest(ChatRequest):
    """A text, or a chat's request: what does not concern its prompt has no effect."""

    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    prompt: str | None = None                      # vLLM
    content: str | None = None                     # llama.cpp
    add_special_tokens: bool | None = None         # vLLM
    add_special: bool | None = None                # llama.cpp
    parse_special: bool | None = None
    with_pieces: bool | None = None                # llama.cpp
    return_token_strs: bool | None = None          # vLLM


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None        # SGLang; default: they are a part of the text


class TextRoutes:
    """Each method: a request -> the answer's fields. ApiError names what is wrong."""

    def __init__(self, preparer: RequestPreparer):
        self.preparer, self.tokenizer = preparer, preparer.tokenizer
        backend = self.tokenizer.backend
        self.special = {backend.id_of(text): text for text in special_tokens(backend)[0]}

    def tokenize(self, request: TokenizeRequest) -> dict:
        given = [name for name in ("prompt", "content", "messages")
                 if getattr(request, name) is not None]
        if len(given) != 1:
            raise ApiError(400, "set exactly one of prompt, content and messages, got "
                           f"{' and '.join(given) or 'none'}", param=given[0] if given else None)
        [name] = given
        if name == "messages":
            messages, template_args = self.preparer.chat_parts(request)
            ids = self.preparer.encode(
                name, lambda: encode_chat(self.tokenizer, messages, **template_args))
        else:
            ids = self.text_ids(request, name)
        answer = dict(tokens=ids, count=len(ids), max_model_len=self.preparer.limit,
                      token_strs=None)
        if request.return_token_strs:
            answer["token_strs"] = [self.tokenizer.piece(i) or "" for i in ids]
        if request.with_pieces:
            answer["tokens"] = [dict(id=i, piece=self.piece(i)) for i in ids]
        return answer

    def text_ids(self, request: TokenizeRequest, name: str) -> list[int]:
        """name: prompt, to which vLLM adds special tokens; content: llama.cpp does not."""
        flags = [flag for flag in (request.add_special_tokens, request.add_special)
                 if flag is not None]
        if len(set(flags)) > 1:
            raise ApiError(400, "add_special_tokens and add_special differ: set one of them",
                           param="add_special_tokens")
        adds = flags[0] if flags else name == "prompt"
        bos = None if adds else False              # None: as the model's files say
        special = request.parse_special is not False
        text = getattr(request, name)
        self.preparer.check_bytes(name, [text])
        return self.preparer.encode(name, lambda: self.tokenizer.encode(text, bos, special))

    def piece(self, i: int) -> str | list[int]:
        """A token's text, or its bytes if they are a part of a character."""
        data = self.preparer.token_bytes(i)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)

    def detokenize(self, request: DetokenizeRequest) -> dict:
        for i in request.tokens:
            if not 0 <= i < self.preparer.n_vocab:
                raise ApiError(400, f"tokens: token id {str(i)[:40]} is out of range: the "
                               f"vocabulary has {self.preparer.n_vocab} tokens", param="tokens")
        text = self.preparer.encode("tokens", lambda: self.decode(
            request.tokens, with_special=not request.skip_special_tokens))
        return dict(prompt=text, content=text)

    def decode(self, ids: list[int], with_special: bool) -> str:
        if not with_special:
            return self.tokenizer.decode(ids)
        text, run = "", []
        for i in ids:
            if i in self.special:
                text += self.tokenizer.decode(run) + self.special[i]
                run = []
            else:
                run.append(i)
        return text + self.tokenizer.decode(run)

    def apply_template(self, request: ChatRequest) -> dict:
        messages, template_args = self.preparer.chat_parts(request)
        prompt = self.preparer.encode(
            "messages", lambda: render(self.tokenizer, messages, **template_args))
        return dict(prompt=prompt)
