"""Text to token ids and back: tokenizer.json, SentencePiece, Llama 3's tiktoken file, and GGUF.

Two well-kept libraries do the work; this file only brings every format to one of them and decides
about the beginning-of-sequence token. It does not know the model.

    tokenizer = load("checkpoints/org/name")       # a directory, a GGUF's metadata, or saved state
    ids = tokenizer.encode("Hello")
    stream = Stream(tokenizer, ids); print(stream.push(next_id), end="")
"""

import base64
import copy
import datetime
import json
import re
import struct
import sys
from pathlib import Path

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _WORDS + r"\p{N}{1,3}" + _REST, _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN, GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{tail}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{tail}"
    rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for tail, number in (("", r"\p{N}"), (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")))
# tokenizer.ggml.pre: how text is cut before merging, each pattern applied to the last one's pieces
GGUF_SPLITS = {
    "gpt-2": (GPT2,), "default": (GPT2,), "olmo": (GPT2,), "smollm": (r"\p{N}", GPT2),
    "starcoder": (r"\p{N}", GPT2), "refact": (r"\p{N}", GPT2), "dbrx": (LLAMA3,),
    "llama-bpe": (LLAMA3,), "llama3": (LLAMA3,), "llama-v3": (LLAMA3,), "smaug-bpe": (LLAMA3,),
    "qwen2": (QWEN2,), "deepseek-r1-qwen": (QWEN2,), "tekken": (TEKKEN,), "gpt-4o": (GPT4O,),
    "llama4": (GPT4O,),
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")    # known words stay whole; BOS first
SHIELD = "\ufdd0"                                  # not a character, by Unicode's promise
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)         # ggml.token_type


class Tokenizer:
    """One of the two libraries, and what the model's files say about special tokens.

    backend: "json" (data: the text of a tokenizer.json) or "sentencepiece" (data: model bytes).
    control: id -> text of the tokens that are no text (SentencePiece alone does not find them).
    names: bos_token, eos_token, … -> text, for the chat template. eos_ids: what the tokenizer's own
    files say of the end of a sequence, for models whose config says nothing.
    """

    def __init__(self, backend: str, data, bos_id: int | None, add_bos: bool | None,
                 chat_template: str | None = None, control: dict[int, str] | None = None,
                 names: dict[str, str] | None = None, eos_ids: list[int] | None = None):
        self.backend, self.data, self.bos_id = backend, data, bos_id
        self.chat_template, self.control, self.names = chat_template, control or {}, names or {}
        if backend == "json":
            from tokenizers import Tokenizer as Fast
            try:
                self.fast = Fast.from_str(data)
            except Exception as e:                 # the library raises the bare class
                raise ValueError(f"not a readable tokenizer.json: {e}") from None
            self.fast.no_truncation()              # fine-tuning scripts leave these behind
            self.fast.no_padding()
            plain, whole = (self.fast.encode("a", add_special_tokens=s).ids for s in (False, True))
            starts = [i for i in range(len(whole)) if whole[i:i + len(plain)] == plain]
            prefix = whole[:starts[0]] if starts else []   # what its post-processor puts first
            if self.bos_id is None and prefix:
                self.bos_id = prefix[0]
            self.add_bos = bool(prefix) if add_bos is None else add_bos
            self.n_vocab = self.fast.get_vocab_size()
        else:
            from sentencepiece import SentencePieceProcessor
            try:
                self.sp = SentencePieceProcessor(model_proto=data)
            except RuntimeError as e:
                raise ValueError(f"not a readable SentencePiece model: {str(e).strip()}") from None
            if self.bos_id is None and self.sp.bos_id() >= 0:
                self.bos_id = self.sp.bos_id()
            self.add_bos = True if add_bos is None else add_bos
            self.n_vocab = self.sp.get_piece_size()
            eos_ids = eos_ids or [i for i in [self.sp.eos_id()] if i >= 0]
            if not self.control:
                self.control = {i: self.sp.id_to_piece(i) for i in range(self.n_vocab)
                                if self.sp.is_control(i)}
            names = sorted(self.control.values(), key=len, reverse=True)
            self.specials = {text: i for i, text in self.control.items()}
            self.cut = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self.add_bos = self.add_bos and self.bos_id is not None
        self.eos_ids = eos_ids or []

    def encode(self, text: str, bos: bool | None = None, special: bool = True) -> list[int]:
        """bos: None is as the model's config says; special=False reads "<s>" as plain text."""
        text = text.encode("utf-8", "replace").decode()    # a terminal may send bytes that are none
        if self.backend == "json":
            self.fast.encode_special_tokens = not special
            ids = self.fast.encode(text, add_special_tokens=False).ids
        elif special and self.cut:
            ids = []
            for piece in self.cut.split(text):
                ids += [self.specials[piece]] if piece in self.specials else self.sp.encode(piece)
        else:
            ids = self.sp.encode(text)
        return [self.bos_id] * (self.add_bos if bos is None else bos) + ids

    def piece(self, i: int) -> str | None:
        """The token itself, as the vocabulary spells it."""
        return self.fast.id_to_token(i) if self.backend == "json" else self.sp.id_to_piece(i)

    def decode(self, ids: list[int]) -> str:
        """Without the special tokens; incomplete UTF-8 becomes U+FFFD."""
        if self.backend == "json":
            return self.fast.decode(ids, skip_special_tokens=True)
        return self.sp.decode([i for i in ids if i < self.n_vocab and i not in self.control])

    def encode_chat(self, messages: list[dict], /, **more) -> list[int]:
        """The ids of render(), in which special tokens are the template's: a message's are text.

        Those in a message are replaced by signs that no text has, until the template's have been
        told from the text between them.
        """
        names, special = self._specials()
        sign = {name: SHIELD + chr(0xf0000 + i) for i, name in enumerate(names)}
        bare = re.compile("|".join(map(re.escape, names)) or "(?!)")

        def hide(text):
            return bare.sub(lambda found: sign[found[0]], text.replace(SHIELD, ""))

        def bring_back(text):
            return re.sub(SHIELD + "(.)", lambda found: names[ord(found[1]) - 0xf0000], text)

        text = self.render([{key: hide(value) if isinstance(value, str) else value
                             for key, value in m.items()} for m in messages], **more)
        if SHIELD not in text:
            return self.encode(text, bos=False)
        first, *pieces = special.split(text)               # text, special, text, …
        ids, later = self.encode(bring_back(first), bos=False, special=False), copy.copy(self)
        if self.backend == "json":                 # some put a space in front, of the first only
            data = re.sub(r'("prepend_scheme":\s*)"first"', r'\1"never"', self.data)
            later.fast = type(self.fast).from_str(data)
        for i, piece in enumerate(pieces):
            ids += later.encode(bring_back(piece), bos=False, special=i % 2 == 0)
        return ids

    def _specials(self) -> tuple[list[str], re.Pattern]:
        """Special tokens, the longest first; and what matches any, with spaces that it swallows."""
        if self.backend == "sentencepiece":
            return sorted(self.specials, key=len, reverse=True), self.cut
        tokens = [t for t in self.fast.get_added_tokens_decoder().values() if t.special]
        tokens.sort(key=lambda t: -len(t.content))
        names = [r"\s*" * t.lstrip + re.escape(t.content) + r"\s*" * t.rstrip for t in tokens]
        return [t.content for t in tokens], re.compile("(" + "|".join(names) + ")")

    def render(self, messages: list[dict], /, **more) -> str:
        """The chat template's text for messages [{role, content}], ready for the next answer.

        In jinja2's sandbox, with what transformers gives a template. ValueError where it refuses.
        """
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message):
            raise ValueError(f"the chat template refuses: {message}")

        class Generation(jinja2.ext.Extension):    # marks answers for training: only its inside
            tags = {"generation"}

            def parse(self, parser):
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                              extensions=["jinja2.ext.loopcontrols", Generation])
        world.filters["tojson"] = lambda x, **k: json.dumps(x, ensure_ascii=False, **k)
        world.globals.update(raise_exception=raise_exception,
                             strftime_now=lambda f: datetime.datetime.now().strftime(f))
        try:
            return world.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None,
                **{**self.names, **more})
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as e:
            raise ValueError(f"the chat template does not render: {e}") from None

    def state(self) -> dict:
        """For a .pth whose source has no tokenizer files; load() takes it back."""
        data = self.data if self.backend == "json" else base64.b64encode(self.data).decode()
        return dict(backend=self.backend, data=data, bos_id=self.bos_id, add_bos=self.add_bos,
                    chat_template=self.chat_template, control=self.control, names=self.names,
                    eos_ids=self.eos_ids)


class Stream:
    """Text as it becomes certain: a character in the middle of its bytes waits for the rest."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]):
        self.tokenizer, self.ids = tokenizer, list(prompt_ids[-8:])        # context: leading spaces
        self.start, self.shown = 0, len(self.ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        self.ids.append(token_id)
        text = self._new()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return text

    def flush(self) -> str:
        """At the end: whatever push still held back."""
        text = self._new()
        self.start = self.shown = len(self.ids)
        return text

    def _new(self) -> str:
        old = self.tokenizer.decode(self.ids[self.start:self.shown])
        return self.tokenizer.decode(self.ids[self.start:])[len(old):]


def differ(a: Tokenizer, b: Tokenizer) -> str | None:
    """How the second vocabulary differs, by its size and a sample of its tokens, or None."""
    if a.n_vocab != b.n_vocab:
        return f"it has {b.n_vocab} tokens, not {a.n_vocab}"
    step = max(1, a.n_vocab // 2000)
    for i in range(0, a.n_vocab, step):
        if a.piece(i) != b.piece(i):
            return f"token {i} is {b.piece(i)!r}, not {a.piece(i)!r}"
    return None


class Row:
    """One row of a batch: collects its new ids and text, knows when to stop.

    finish_reason: "stop", an end-of-sequence token or a stop string, "length", after max_new ids,
    or what finish() was told; None: not yet.
    """

    def __init__(self, tokenizer, prompt_ids: list[int], eos_ids: set[int] = frozenset(),
                 stops: list[str] = (), max_new: int | None = None):
        self.stream, self.prompt_ids = Stream(tokenizer, prompt_ids), prompt_ids
        self.eos_ids, self.stops, self.max_new = eos_ids, stops, max_new
        self.ids, self.text, self.shown, self.finish_reason = [], "", 0, None

    def push(self, token_id: int) -> str:
        """-> text to show now. What may turn out to be the beginning of a stop string waits."""
        if self.finish_reason:
            return ""
        self.ids.append(token_id)
        if token_id in self.eos_ids:
            return self.finish("stop")
        searched = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += self.stream.push(token_id)
        found = [at for at in (self.text.find(s, searched) for s in self.stops) if at >= 0]
        if found:
            self.text, self.finish_reason = self.text[:min(found)], "stop"
            return self._show(len(self.text))
        if len(self.ids) == self.max_new:
            return self.finish("length")
        begun = [n for s in self.stops for n in range(len(s)) if self.text.endswith(s[:n])]
        return self._show(len(self.text) - max(begun, default=0))

    def finish(self, reason: str) -> str:
        """-> what was still held back."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.text += self.stream.flush()
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece, self.shown = self.text[self.shown:end], max(self.shown, end)
        return piece


def load(source: Path | str | dict) -> Tokenizer:
    """A directory with tokenizer files, a GGUF's `tokenizer.*` metadata, or a Tokenizer's state().

    FileNotFoundError or ValueError say in one line what is missing or broken.
    """
    if isinstance(source, dict) and "backend" in source:
        data = source["data"] if source["backend"] == "json" else base64.b64decode(source["data"])
        return Tokenizer(**{**source, "data": data})
    if isinstance(source, dict):
        return from_gguf(source)
    return from_directory(Path(source))


def from_directory(directory: Path) -> Tokenizer:
    """tokenizer.json, else tokenizer.model: SentencePiece, or Llama 3's list of base64 tokens."""
    config = _json(directory / "tokenizer_config.json")
    names = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items()
             if k.endswith("_token") and isinstance(v, (str, dict))}       # or an AddedToken
    more = dict(add_bos=config.get("add_bos_token"), names=names,
                chat_template=_chat_template(directory, config))
    if (directory / "tokenizer.json").exists():
        try:
            data = (directory / "tokenizer.json").read_text(encoding="utf-8")
            tokenizer = Tokenizer("json", data, None, **more)
        except ValueError as e:
            raise ValueError(f"{directory / 'tokenizer.json'}: {e}") from None
        if "bos_token" in names:
            tokenizer.bos_id = tokenizer.fast.token_to_id(names["bos_token"])
            tokenizer.add_bos = tokenizer.add_bos and tokenizer.bos_id is not None
        return tokenizer
    path = directory / "tokenizer.model"
    if not path.exists():
        raise FileNotFoundError(f"{directory}: no tokenizer: expected tokenizer.json or "
                                "tokenizer.model")
    data = path.read_bytes()
    try:
        if re.match(rb"[A-Za-z0-9+/=]+ \d+\n", data):
            text, eos_ids = tiktoken_to_json(data)
            return Tokenizer("json", text, None, **{**more, "add_bos": True}, eos_ids=eos_ids)
        return Tokenizer("sentencepiece", data, None, **more)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def _json(path: Path) -> dict:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _chat_template(directory: Path, config: dict) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json (a string, or a list of named ones)."""
    if (directory / "chat_template.jinja").exists():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template


# ---- Byte-level BPE: Llama 3's tiktoken file, and GGUF's "gpt2" kind -----------------------------

def byte_letters() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (GPT-2's)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], splits: tuple[str, ...],
               special: list[str], added: list[str] = (), whole_words: bool = False,
               nfc: bool = False):
    """A tokenizers.Tokenizer. whole_words: a piece that is a token needs no merges (Llama 3)."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    fast = Fast(models.BPE(vocab, merges, ignore_merges=whole_words))
    fast.normalizer = normalizers.NFC() if nfc else None
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    fast.add_tokens([AddedToken(t, normalized=False) for t in added])
    return fast


def tiktoken_to_json(data: bytes) -> tuple[str, list[int]]:
    """Llama 3's tokenizer.model, lines of "base64 rank": merges follow from the ranks.

    -> the text of a tokenizer.json, and the ids that end a text, a message or a turn.
    """
    letters = byte_letters()
    lines = map(bytes.split, data.splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    vocab = {"".join(letters[b] for b in token): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in vocab.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [(rank, vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab]
    merges = [(a, b) for *_, a, b in sorted(merges)]
    n = len(vocab)
    reserved = "<|reserved_special_token_{}|>".format
    names = ["<|begin_of_text|>", "<|end_of_text|>", reserved(0), reserved(1),
             "<|finetune_right_pad_id|>", reserved(2), "<|start_header_id|>", "<|end_header_id|>",
             "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    names += [reserved(i) for i in range(3, 256 - len(names) + 3)]
    fast = byte_level(vocab, merges, (LLAMA3,), names, whole_words=True)
    from tokenizers.processors import TemplateProcessing
    fast.post_processor = TemplateProcessing(single=f"{names[0]} $A",
                                             special_tokens=[(names[0], n)])
    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    return fast.to_str(), [n + names.index(end) for end in ends]


# ---- GGUF ---------------------------------------------------------------------------------------

def from_gguf(metadata: dict) -> Tokenizer:
    """The tokenizer inside a GGUF: "gpt2" is byte-level BPE, "llama" is SentencePiece."""
    get = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}.get
    kind, tokens = get("model"), get("tokens")
    if not tokens:
        raise ValueError("this GGUF holds no tokenizer (tokenizer.ggml.tokens)")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"GGUF tokenizer '{kind}' is not supported (supported: gpt2, llama)")
    types = get("token_type") or [NORMAL] * len(tokens)
    control = {i: t for i, t in enumerate(tokens) if types[i] == CONTROL}
    bos_id, ids = get("bos_token_id"), {k: get(k + "_token_id") for k in ("bos", "eos", "padding")}
    more = dict(chat_template=metadata.get("tokenizer.chat_template"),
                names={f"{k.replace('padding', 'pad')}_token": tokens[i] for k, i in ids.items()
                       if i is not None and i < len(tokens)})
    if kind == "llama":
        data = sentencepiece_model(tokens, get("scores") or [0.0] * len(tokens), types,
                                   bool(get("add_space_prefix", True)), get("unknown_token_id", 0))
        return Tokenizer("sentencepiece", data, bos_id, get("add_bos_token", True),
                         control=control, **more)
    pre = get("pre", "default")
    if pre == "default":
        print("note: this GGUF does not say how to split text into words: as GPT-2 does",
              file=sys.stderr)
    if pre not in GGUF_SPLITS:
        raise ValueError(f"GGUF pre-tokenizer '{pre}' is not supported "
                         f"(supported: {', '.join(GGUF_SPLITS)})")
    merges = [tuple(m.split(" ")) for m in get("merges", [])]
    added = [t for i, t in enumerate(tokens) if types[i] == USER_DEFINED]
    whole = pre in WHOLE_WORDS
    fast = byte_level({t: i for i, t in enumerate(tokens)}, merges, GGUF_SPLITS[pre],
                      list(control.values()), added, whole_words=whole,
                      nfc=GGUF_SPLITS[pre] == (QWEN2,))
    return Tokenizer("json", fast.to_str(), bos_id, get("add_bos_token", whole), **more)


def sentencepiece_model(tokens, scores, types, space_prefix: bool, unk_id: int) -> bytes:
    """A SentencePiece model file (sentencepiece_model.proto), written by hand: it is short.

    message Model  { repeated Piece pieces = 1; Trainer trainer = 2; Normalizer normalizer = 3; }
    message Piece  { string piece = 1; float score = 2; Type type = 3; }
    """
    def varint(n):
        out = bytearray()
        while n > 127:
            out.append(n & 127 | 128)
            n >>= 7
        return bytes((*out, n))

    def number(tag, n):
        return varint(tag << 3) + varint(n)

    def bytes_(tag, data):
        return varint(tag << 3 | 2) + varint(len(data)) + data

    out = []
    for i, (token, score, kind) in enumerate(zip(tokens, scores, types)):
        if kind == USER_DEFINED:                   # llama.cpp stores these with real spaces
            token = token.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
        kind = UNKNOWN if i == unk_id else NORMAL if kind == UNKNOWN else kind
        piece = bytes_(1, token.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind)
        out.append(bytes_(1, piece))
    bpe, byte_fallback = 2, any(kind == BYTE for kind in types)
    out.append(bytes_(2, number(3, bpe) + number(35, byte_fallback) + number(40, unk_id)))
    out.append(bytes_(3, bytes_(1, b"identity")            # no normalization; spaces are kept
                      + number(3, space_prefix) + number(4, 0) + number(5, 1)))
    return b"".join(out)


class Numbers:
    """Stands in where a model has no tokenizer: ids are shown as they are."""

    eos_ids: list[int] = []
    chat_template, n_vocab = None, 0

    def encode(self, text: str) -> list[int]:
        raise ValueError("this model has no tokenizer: give --prompt an integer, that many random "
                         "tokens")

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {i}" for i in ids)
