"""Split patterns of a single family, or two, which only GGUFs need. The others: byte_level.py.

    fast = byte_level(vocab, merges, DEEPSEEK_CODER, special=[])

Source of the patterns: the families' tokenizer.json, as llama.cpp's src/llama-vocab.cpp has them.
"""

from gpt_faster.text.byte_level import DEEPSEEK3, DIGITS, GPT2, GPT4O, LLAMA3, QWEN2, THREES

_SPACES = "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
JAIS2 = LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _SPACES + r"\s{1,2}(?!\S)|\s{1}"
MINICPM5 = (THREES, QWEN2.replace(r"|\p{N}|", r"|\p{N}+|"))
UFAKZEKA = "[^" + QWEN2.split("|[^", 1)[1]                           # no English contractions
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+")
YOUTU = ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
         GPT4O.replace("{1,3}", ""))
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
SUPERBPE = (r"\p{N}+", r"(?=(\d{3})+(?!\d))")                        # tokens of several words
SPARK = (*DEEPSEEK3[:2], DEEPSEEK3[2].replace(r"+[\r\n]*|\s*[\r\n]+|", r"+|[\r\n]|"), DIGITS)
CHAMELEON = ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\t\n]|    |  )",
             DIGITS, r"[\p{P}!-/:-@\[-`{-~]", GPT2)
LINES = r"[^\n]+|[\n]+"
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", DIGITS)
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭ"
    "Ꚁ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃")
DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
                DEEPSEEK_CODER[3], r"\p{N}+")
