"""No file imports from a higher layer, and neither of sampler and trainer imports the other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = """config processes atomic binpack grpo | family kernels | sampler tools
trainer tasks driver | rollout toy | plumbing | train warm_start view | mars
recipes siblings bench"""
HEIGHT = {
    name: height
    for height, names in enumerate(LAYERS.replace("\n", "|").split("|"))
    for name in names.split()
}
FILES = [path.relative_to(ROOT) for name in HEIGHT for path in ROOT.glob(f"{name}/**/*.py")]
FILES += [Path(path.name) for path in ROOT.glob("*.py")]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_file_imports_from_a_higher_layer(path):
    own = path.parts[0].removesuffix(".py")
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in {name.split(".")[0] for name in names} & HEIGHT.keys():
            assert HEIGHT[name] <= HEIGHT[own], f"{own} imports {name}, which is higher"
            assert (own, name) != ("trainer", "sampler")


def test_no_file_needs_bm25s_before_it_searches():
    """A machine with a GPU may lack it; its import must not hide a test that needs the GPU."""
    for path in [*FILES, *ROOT.glob("tests/**/*.py")]:
        assert not re.search("^(import|from) bm25s", (ROOT / path).read_text(), re.MULTILINE), path
