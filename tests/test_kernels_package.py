"""What the package imports. That its name does no harm: every test with a stock model."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALLOWED = {"torch", "triton", "grpo", "config", "kernels"} | set(sys.stdlib_module_names)


def test_kernels_import_torch_triton_and_the_loss_only():
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert {name.split(".")[0] for name in names} <= ALLOWED, path
