"""The id of the request that is being answered: in the header x-request-id and in log lines.

    token = begin(headers); current.get()          # "req_5f0c…"
    log_line("serve.py: error: …")                 # ends with "[req_5f0c…]"
"""

import re
import secrets
from contextvars import ContextVar

from generate import log

HEADERS = (b"x-request-id", b"request-id")         # Anthropic's clients read the second
SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")     # no quotes, spaces, line ends
current: ContextVar[str] = ContextVar("request_id", default="")   # to_thread() takes it along


def begin(headers: list[tuple[bytes, bytes]]) -> str:
    """Set `current` to the client's own id, if it is a plain one, or to a new one."""
    sent = dict(headers).get(HEADERS[0], b"")
    own = SANE.fullmatch(sent)
    current.set(sent.decode("ascii") if own else f"req_{secrets.token_hex(12)}")
    return current.get()


def log_line(text: str, request_id: str | None = None) -> None:
    """request_id: of another thread's request; None: the current one's."""
    request_id = current.get() if request_id is None else request_id
    log(f"{text} [{request_id}]" if request_id else text)
