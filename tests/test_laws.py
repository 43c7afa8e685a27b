"""What shared design promises and no other test holds: imports, purity, the README's own claims."""

import ast
import re
import sys
from pathlib import Path

import pytest

import generate
from cli import flags

ROOT = Path(generate.__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))
import map as readme_map  # noqa: E402

ROOMS = ("bench", "cli", "formats", "gptq", "kernels", "layers")
CORE = ("generate", "model", "quantize", "sampling", "speculate", "tp")
COMMANDS = ("benchmark", "eval")
# What each core file and each room may import of ours, beside its own neighbours.
MAY_IMPORT = {
    "kernels": set(), "layers": set(), "sampling": set(), "model": {"layers"},
    "formats": {"model", "quantize"}, "gptq": {"formats", "model", "quantize", "cli"}, "tp": {"formats"},
    "quantize": {"kernels", "model", "cli"},
    "speculate": {"sampling"},
    "generate": {"model", "sampling", "speculate", "quantize", "formats", "kernels", "tp", "cli"},
    "cli": {*CORE, "formats", "gptq", "kernels"}, "bench": {*CORE, "cli", "formats"},
    "eval": {"cli"}, "benchmark": {"bench"},
}
MODULES = [*ROOT.glob("*.py"), *(p for room in ROOMS for p in (ROOT / room).glob("*.py"))]


def imports(path):
    """Names of the modules imported, and whether each is at the top of the file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name.split(".")[0], node in tree.body) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0], node in tree.body


def test_the_root_is_the_core_and_the_commands():
    assert {p.stem for p in ROOT.glob("*.py")} == {*CORE, *COMMANDS}
    for room in ROOMS:
        assert not [p for p in (ROOT / room).iterdir() if p.is_dir() and p.name != "__pycache__"], "one level deep"


def test_imports_point_downward():
    for path in MODULES:
        owner = path.stem if path.parent == ROOT else path.parent.name
        main = "__main__" in path.read_text()              # the last lines of a command
        for module, top in imports(path):
            if module in MAY_IMPORT and module != owner:
                assert module in MAY_IMPORT[owner] or (main and not top), f"{path} imports {module}"
                assert top or main, f"{path} imports {module} late"
        assert "sys.path" not in path.read_text(), path


def test_the_model_knows_only_the_math():
    source = (ROOT / "model.py").read_text()
    tree = ast.parse(source)
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not calls & {"print", "open"} and not attributes & {"item", "tolist", "compile"}
    code = re.sub(r'""".*?"""|#.*', "", source, flags=re.S)
    assert not re.search(r"llama|qwen|gemma|mistral|int8|int4|rank", code.replace("llama3", ""), re.I)
    assert {m for m, _ in imports(ROOT / "model.py")} == {"math", "dataclasses", "torch"}


def test_nothing_from_a_checkpoint_is_executed():
    for path in MODULES:
        source = path.read_text()
        for call in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", source):
            assert "weights_only=True" in call, f"{path.name}: {call}"
        assert not re.search(r"\bpickle\.loads?\(|\beval\(|\bexec\(", source.replace(".eval()", ""))


def test_one_place_for_defaults():
    """Every flag is in the README, and every flag in the README exists."""
    readme = (ROOT / "README.md").read_text()
    known = {o for a in flags.build_parser()._actions for o in a.option_strings if o.startswith("--")}
    missing = known - set(re.findall(r"--\w+", readme)) - {"--help"}
    assert not missing, f"not in the README: {missing}"


@pytest.mark.parametrize("part", readme_map.PARTS)
def test_readme_map_is_fresh(part):
    readme = (ROOT / "README.md").read_text()
    stated = readme.split(readme_map.begin(part))[1].split(readme_map.end(part))[0]
    assert stated == readme_map.PARTS[part](), "run: python scripts/map.py --write"


def test_every_family_is_tested():
    import tiny

    from formats import families
    kinds = {tiny.FAMILIES[name]().model_type for name in tiny.FAMILIES}
    assert kinds - {"gemma3"} == set(families.FAMILIES) and set(tiny.MODELS) == kinds - {"gemma3"}


def test_readme_paths_exist():
    readme = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", readme) + re.findall(r"(?:bash |\./)(scripts/\S+\.sh)", readme):
        assert (ROOT / path).exists(), path


def test_no_absolute_paths_of_one_machine():
    for path in [*MODULES, *ROOT.glob("scripts/*"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        text = Path(path).read_text() if path.is_file() else ""
        assert not re.search(r"/(work|root|home)/\w", text), path
