"""What llama.cpp's tokenizers know and ours do not: names of a checkout against our tables.

    python scripts/dev/llama_cpp_lists.py path/to/llama.cpp                   # prints what is new
    python scripts/dev/llama_cpp_lists.py path/to/llama.cpp --write 0.3.37    # and records it

Reads src/llama-vocab.cpp and conversion/base.py as text: pre-tokenizers with their flags, tokenizer
models, end tokens. `--write VERSION` records them in tests/llama_cpp_lists.json, to which
tests/test_gguf_tokenizers.py holds the tables. A checkout is in the source archive of
llama-cpp-python, under vendor/.
"""

import argparse
import datetime
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests/llama_cpp_lists.json"
sys.path.insert(0, str(ROOT))
from gpt_faster.text import end_tokens, gguf_tokenizer  # noqa: E402

READ_MODELS = ("gpt2", "llama", "gemma4")


def lists_of(checkout: Path) -> dict:
    """The names in a checkout: {"pre": {name: flags}, "written_pre", "models", "end", "fim"}."""
    source = (checkout / "src/llama-vocab.cpp").read_text()
    base = (checkout / "conversion/base.py").read_text()
    return dict(pre=_pre_tokenizers(source), written_pre=_unique(r'res = "([^"]+)"', base),
                models=_unique(r'tokenizer_model == "([^"]+)"', source), **_token_names(source))


def _pre_tokenizers(source: str) -> dict[str, list[str]]:
    """llama.cpp's chain of ifs: conditions with names, then a body that sets the flags."""
    chain = source[source.index("if (tokenizer_pre.empty())"):]
    chain = chain[:chain.index("unknown pre-tokenizer type")]
    found = {}
    for branch in chain.split("else if"):
        flags = re.findall(r"(ignore_merges|add_bos)\s*= true", branch)
        for name in re.findall(r'tokenizer_pre == "([^"]+)"', branch):
            found[name] = sorted(flags)
    return found


def _token_names(source: str) -> dict[str, list[str]]:
    """End tokens, and all other tokens that are known by their texts."""
    everything = _unique(r't\.first == "([^"]+)"', source)
    start = source.index("special_eog_ids.clear()")
    end = _unique(r't\.first == "([^"]+)"', source[start:source.index("// @ngxson", start)])
    return dict(end=end, other_names=sorted(set(everything) - set(end)))


def _unique(pattern: str, text: str) -> list[str]:
    return sorted(set(re.findall(pattern, text)))


def differences(lists: dict) -> list[str]:
    """A line for each name or flag that our tables lack or have otherwise."""
    known = {*gguf_tokenizer.GGUF_SPLITS, *gguf_tokenizer.SPACE_PRE, *gguf_tokenizer.REFUSED_PRE}
    found = [f"pre-tokenizer {name}" for name in lists["pre"] if name not in known]
    for flag, ours in (("ignore_merges", gguf_tokenizer.IGNORE_MERGES),
                       ("add_bos", gguf_tokenizer.ADD_BOS)):
        theirs = {name for name, flags in lists["pre"].items() if flag in flags}
        if "gemma4" in ours:                       # llama.cpp sets it after reading the keys
            theirs.add("gemma4")
        found += [f"{flag} of {name}" for name in sorted(theirs ^ set(ours))
                  if name not in gguf_tokenizer.REFUSED_PRE]
    found += [f"the converter's pre-tokenizer {name}" for name in lists["written_pre"]
              if name not in known and name not in gguf_tokenizer.WORDPIECE_PRE]
    models = {*READ_MODELS, *gguf_tokenizer.REFUSED_MODELS}
    found += [f"tokenizer model {name}" for name in lists["models"] if name not in models]
    fim = {text for texts in end_tokens.FIM_TOKENS.values() for text in texts}
    for kind, ours in (("end", set(end_tokens.EOG_TOKENS)),
                       ("other_names", fim | end_tokens.FIM_MARKERS | end_tokens.HARMONY_MARKERS)):
        found += [f"{kind}: token {name}" for name in sorted(set(lists[kind]) ^ ours)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("checkout", type=Path, help="a directory with llama.cpp's source")
    parser.add_argument("--write", metavar="VERSION", help="record the names as this version's")
    args = parser.parse_args()
    lists = lists_of(args.checkout)
    if args.write:
        source = f"llama.cpp in the source archive of llama-cpp-python {args.write}"
        record = dict(source=source, date=str(datetime.date.today()), **lists)
        lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
                 for key, value in record.items())
        RECORD.write_text("{" + ",\n ".join(lines) + "}\n")
    found = differences(lists)
    print("\n".join(found) if found else "nothing is new")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
