"""What shared design promises and no other test holds: imports, purity, and what README and docs claim.

Generated tables are not tested here: run scripts/dev/map.py --check before publishing.
"""

import ast
import functools
import importlib
import re
import sys
from pathlib import Path

import pytest

import generate

ROOT = Path(generate.__file__).parent
sys.path.insert(0, str(ROOT / "scripts/dev"))
import architecture_svg  # noqa: E402
import map as readme_map  # noqa: E402

ROOMS = ("bench", "cli", "decoding", "formats", "kernels", "layers", "quantization", "server", "storage", "text")
IN_TWO = {"kernels": ("cpu", "cuda")}              # a room with rooms of its own
CORE = ("checkpoint", "generate", "model", "quantize", "sampling", "speculate", "tokenizer", "tp")
COMMANDS = ("benchmark", "eval", "serve")
# What each core file and each room may import of ours, beside its own neighbours. the others lie beside the rooms.
BELOW = {*CORE, "devices", "formats", "kernels", "layers", "loading", "storage", "text"}
MAY_IMPORT = {
    **dict.fromkeys(CORE, {*CORE}),
    "layers": {*CORE}, "text": {*CORE}, "storage": {"kernels"}, "kernels": {*CORE, "layers", "storage"},
    "formats": {*CORE, "kernels", "layers", "text"}, "loading": BELOW - {"loading"}, "devices": {*CORE, "kernels", "layers"}, "runtime": {*BELOW, "decoding"},
    "decoding": BELOW, "quantization": BELOW,
    "cli": {*BELOW, "decoding", "quantization", "runtime"}, "bench": {*BELOW, "cli", "decoding"},
    "server": {*BELOW, "cli", "decoding", "runtime"}, "eval": {"cli"}, "benchmark": {"bench", "cli"}, "serve": {"server", "cli"},
    "model": set(), "sampling": set(), "quantize": {"checkpoint", "model", "tokenizer"}, "checkpoint": {"model", "quantize", "sampling"},
    "tokenizer": {"checkpoint"}, "tp": {"checkpoint", "model"}, "speculate": {"generate", "sampling", "tp"},
}
LATE = {("storage", "kernels")}                    # its notes; known_sources' digests are made without torch
HOUSE = ROOT / "gpt_faster"
MODULES = [*ROOT.glob("*.py"), *HOUSE.rglob("*.py")]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def ours(name):
    """gpt_faster.kernels.cpu.native -> kernels; a module of torch's: its first name."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "gpt_faster" and rest else first


def imports(path):
    """Names of the modules imported, ours as MAY_IMPORT has them, and whether each is at the top of the file."""
    tree = ast.parse(path.read_text())
    at_top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((ours(a.name), id(node) in at_top) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "gpt_faster":
            yield from ((a.name, id(node) in at_top) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield ours(node.module), id(node) in at_top


def test_the_root_is_the_core_and_the_commands():
    assert {p.stem for p in ROOT.glob("*.py")} == {*CORE, *COMMANDS}
    assert {p.stem for p in HOUSE.glob("*.py")} == {"__init__", "devices", "loading", "runtime"}
    assert {p.name for p in HOUSE.iterdir() if p.is_dir()} - {"__pycache__"} == {*ROOMS}
    for room in ROOMS:
        inside = {p.name for p in (HOUSE / room).iterdir() if p.is_dir()} - {"__pycache__"}
        assert inside == {*IN_TWO.get(room, ())}, room


def test_imports_point_downward():
    for path in MODULES:
        if path.name == "__init__.py":
            continue
        owner = path.stem if path.parent in (ROOT, HOUSE) else path.relative_to(HOUSE).parts[0]
        main = "__main__" in path.read_text()              # the last lines of a command
        for module, top in imports(path):
            if module in MAY_IMPORT and module != owner:
                assert module in MAY_IMPORT[owner] or (main and not top), f"{path} imports {module}"
                assert top or main or (owner, module) in LATE, f"{path} imports {module} late"
        assert "sys.path" not in path.read_text(), path


def test_the_picture_of_the_architecture():
    """docs/architecture.svg: what the script writes, with every room and core file, and its rule about imports holds."""
    assert architecture_svg.FILE.read_text() == architecture_svg.svg(), "python scripts/dev/architecture_svg.py --write"
    commands, rooms, core = ([[box.name.removesuffix(".py").strip("/") for box in row] for row in band.rows]
                             for band in architecture_svg.BANDS)
    assert {*sum(commands, [])} == {"generate", "quantize", *COMMANDS}
    assert {*sum(rooms, [])} == {*ROOMS, "devices", "loading", "runtime"} and {*sum(core, [])} == {*CORE}
    order = sum(rooms + core, [])                      # row by row, from the left
    for path in MODULES:
        owner = path.stem if path.parent in (ROOT, HOUSE) else path.relative_to(HOUSE).parts[0]
        for module, top in imports(path) if owner in order else ():
            if top and module in order and (owner, module) not in LATE:
                assert order.index(module) >= order.index(owner), f"{path} imports {module}"


def test_the_model_knows_only_the_math():
    source = (ROOT / "model.py").read_text()
    tree = ast.parse(source)
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not calls & {"print", "open"} and not attributes & {"item", "tolist", "compile", "is_compiling", "compiler"}
    code = re.sub(r'""".*?"""|#.*', "", source, flags=re.S)
    assert not re.search(r"llama|qwen|gemma|mistral|int8|int4|rank", code.replace("llama3", ""), re.I)
    assert {m for m, _ in imports(ROOT / "model.py")} == {"dataclasses", "math", "torch"}


PRIVATE = re.compile(r"\b(?:torch|ops)(?:\.\w+)*\._(?!_)\w[\w.]*")            # torch._inductor.cache, torch.ops.aten._mm
# Settings that torch documents, and the name that PyTorch's files give to "here is a tensor".
PUBLIC = ("torch._dynamo.config", "torch._dynamo.reset", "torch._inductor.config", "torch._utils._rebuild_tensor_v2")


def test_private_parts_of_torch_are_in_one_file():
    """Law 11; what becomes of the tokens without each is in test_gpu.py and test_quantize.py."""
    found = {str(p.relative_to(ROOT)): set(PRIVATE.findall(p.read_text())) for p in MODULES}
    assert len(found.pop("gpt_faster/kernels/torch_internals.py")) > 5
    for name, parts in found.items():
        assert not {part for part in parts if not part.startswith(PUBLIC)}, name


def test_nothing_from_a_checkpoint_is_executed():
    for path in MODULES:
        source = path.read_text()
        for call in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", source):
            assert "weights_only=True" in call, f"{path.name}: {call}"
        assert not re.search(r"\bpickle\.loads?\(|\beval\(|\bexec\(", source.replace(".eval()", ""))


def test_one_reader_of_each_format():
    """formats/ calls checkpoint.py's: nobody else opens safetensors, a PyTorch file or a model's JSON."""
    for path in MODULES:
        if path.name != "checkpoint.py" or path.parent != ROOT:
            source = path.read_text()
            assert not re.search(r"\bsafe_open\b|\btorch\.load\(", source), path
            if path.parent.name in ("formats", "text") or path.stem in CORE:
                assert "json.load" not in re.sub(r'""".*?"""', "", source, flags=re.S) or path.name == "token_bytes.py", path


# Flags that documents name and that are not ours.
FOREIGN_FLAGS = {"--model_args", "--n", "--formats", "--save", "--all", "--standalone", "--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_id",
                 "--rdzv_endpoint", "--require_hashes", "--no_deps"}


def flags_in(text):
    """Normalized: a dash may stand for an underscore."""
    found = re.findall(r"(?<![\w-])--([a-z][a-z0-9_-]*)", text)
    return {"--" + name.replace("-", "_") for name in found}


@functools.cache
def parsed_flags():
    """The flags of every parser of the repository, and those that the test script takes."""
    known = flags_in((ROOT / "scripts/test.sh").read_text()) | {"--help"}
    for path in [*MODULES, *ROOT.glob("scripts/**/*.py"), ROOT / "tests/tiers.py", ROOT / "tests/mutants.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("add", "add_argument"):
                texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
                known.update(t for t in texts if isinstance(t, str) and t.startswith("--"))
    return known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_named_exists(page):
    unknown = flags_in(page.read_text()) - parsed_flags() - FOREIGN_FLAGS
    assert not unknown, f"no parser has {unknown}"


def test_every_flag_that_code_names_exists():
    """In docstrings, help and messages: strings of several words."""
    for path in MODULES:
        strings = [n.value for n in ast.walk(ast.parse(path.read_text()))
                   if isinstance(n, ast.Constant) and isinstance(n.value, str) and " " in n.value]
        unknown = flags_in("\n".join(strings)) - parsed_flags() - FOREIGN_FLAGS
        assert not unknown, f"{path}: no parser has {unknown}"


def test_every_table_names_its_commit():
    for machine in readme_map.machines():
        for title, result in machine["tables"].items():
            assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", result["commit"]), title


def test_how_code_is_counted():
    source = '''"""A docstring

of three lines."""
import math                     # a comment

X = """two
lines"""


class Box:
    def area(self, a,
             b):
        """One line."""
        def inner():
            return 1
        return a * b
'''
    assert readme_map.code_lines(source) == {4, 6, 7, 10, 11, 12, 14, 15, 16}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A README with one generated table, which is up to date."""
    (tmp_path / "README.md").write_text(f"Words.\n{readme_map.begin('a')}one\n{readme_map.end('a')}\nMore.\n")
    for name, value in dict(ROOT=tmp_path, PARTS={"a": ("README.md", lambda: "one\n")}).items():
        monkeypatch.setattr(readme_map, name, value)
    return tmp_path / "README.md"


@pytest.mark.parametrize("file, old, new, complaint", [
    ("README.md", "one", "one", None), ("README.md", "one", "two", "README.md: the table 'a' is outdated, run: python scripts/dev/map.py --write"),
    ("formats", "llama", "my_llama", "gpt_faster/formats/families.py: 'my_llama' has no variant in tests/tiny.py")],
    ids=["fresh", "stale", "family"])
def test_the_check_names_what_is_stale(page, monkeypatch, capsys, file, old, new, complaint):
    """scripts/dev/map.py --check, which is no test: a fork's outdated table fails nothing."""
    from gpt_faster.formats.families import FAMILIES
    monkeypatch.setattr(sys, "argv", ["map.py", "--check"])
    if file == "formats":
        monkeypatch.setitem(FAMILIES, new, FAMILIES[old])
    else:
        path = page.parent / file
        path.write_text(path.read_text().replace(old, new))
    status = readme_map.main()
    assert capsys.readouterr().out == (f"{complaint}\n" if complaint else "") and status == int(complaint is not None)
    monkeypatch.setattr(sys, "argv", ["map.py", "--write"])
    readme_map.main()
    assert readme_map.is_fresh("a") and page.read_text().endswith("\nMore.\n")


def test_a_page_without_the_table_is_left_alone(page, monkeypatch):
    page.write_text("Words.\n")
    monkeypatch.setattr(sys, "argv", ["map.py", "--write"])
    assert readme_map.main() == 0 and readme_map.is_fresh("a") and page.read_text() == "Words.\n"


def links(page):
    """Relative links and pictures of a page -> paths."""
    targets = re.findall(r"\]\((?!http)([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def test_the_quick_tier_covers_every_field(families):
    """Whatever a config can say, some variant of the quick tier says it."""
    import dataclasses

    import tiny

    from gpt_faster.formats.load import read_checkpoint
    from gpt_faster.formats.pth import PARTS
    from gpt_faster.layers.attention import AttentionVariant
    from gpt_faster.layers.block import BlockVariant
    from gpt_faster.layers.feed_forward import FeedForwardVariant
    from gpt_faster.layers.moe import MoEVariant
    from model import ModelConfig
    configs = [read_checkpoint(families(name)[0]).cfg for name in tiny.COVER]
    parts = [part for cfg in configs for part in (
        cfg, cfg.moe, cfg.norm, cfg.attention, cfg.ffn, cfg.block, cfg.per_layer, cfg.logit_cap, *cfg.mixer, *cfg.after_embed)]
    assert not {*PARTS.values()} - {*map(type, parts)}
    for kind in (ModelConfig, MoEVariant, AttentionVariant, FeedForwardVariant, BlockVariant):
        for field in dataclasses.fields(kind):
            if field.default is not dataclasses.MISSING and field.name != "kind":
                values = [getattr(part, field.name) for part in parts if isinstance(part, kind)]
                assert any(value != field.default for value in values), f"{kind.__name__}.{field.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_readme_paths_exist(page):
    """Links, scripts, commands and files that a page names."""
    text = page.read_text()
    missing = [str(path) for path in links(page) if not path.exists()]
    named = re.findall(r"(?:bash |\./|python )((?:scripts/)?(?:dev/)?\w+\.(?:sh|py))", text)
    named += re.findall(r"`((?:\w+/)+\w+\.(?:py|sh|md|txt))`", text)
    missing += [path for path in named if not (ROOT / path).exists()]
    assert not missing


FOREIGN = {"UTCHMMA", "aot_compile", "bmm", "cpp_wrapper", "guard_filter_fn", "kv_b", "ldtilecfg", "load_compiled_function", "make_fx",
           "_linear_pointwise", "nested_compile_region", "save_compiled_function", "skip_guard_eval_unsafe", "standalone_compile",
           "tcgen05", "vscalefps", "wgmma"}        # torch's, an instruction's, a tensor's


@functools.cache
def words_of_the_code():
    files = [path for ending in ("py", "h", "cpp", "sh", "html", "ini") for path in ROOT.rglob(f"*.{ending}")
             if not path.relative_to(ROOT).parts[0].startswith(".")]
    files += [*ROOT.glob("requirements*.txt"), *ROOT.glob("benchmarks/*.json")]
    return set(re.findall(r"\w+", "\n".join(path.read_text(errors="replace") for path in files))) | FOREIGN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_on_a_page_exist(page):
    """Functions, classes, fields and constants in backticks: a renamed one is a stale sentence."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    names = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text)
    assert not [name for name in names if not words_of_the_code().issuperset(name.split("."))]


def anchors(page):
    """What its headings are called in a link, as on GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page):
    named = re.findall(r"\]\((?!http)([^)#\s]*)#([^)\s]+)\)", page.read_text())
    assert not [(name, anchor) for name, anchor in named
                if anchor not in anchors((page.parent / name).resolve() if name else page)]


def test_every_page_is_reachable():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            todo += links(page)
    assert {p.resolve() for p in ROOT.glob("docs/*.md")} <= {p.resolve() for p in reached}


def test_readme_python_names_exist():
    """What the README's example imports exists."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    assert imported
    for node in imported:
        module = importlib.import_module(node.module)
        assert all(hasattr(module, a.name) for a in node.names), ast.unparse(node)


def test_no_absolute_paths_of_one_machine():
    for path in [*MODULES, *ROOT.glob("scripts/**/*"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        text = Path(path).read_text() if path.is_file() and path.suffix != ".pyc" else ""
        assert not re.search(r"/(work|root|home)/\w", text), path
