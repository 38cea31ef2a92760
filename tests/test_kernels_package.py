"""The package beside others: what it imports, and what transformers makes of its name."""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALLOWED = {"torch", "triton", "grpo", "config", "kernels"} | set(sys.stdlib_module_names)
PLAIN_TRANSFORMERS = """
from transformers import AutoConfig, AutoModelForCausalLM
sizes = dict(vocab_size=11, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, **heads))
print(type(model).__name__)
"""


def test_kernels_import_torch_triton_and_the_loss_only():
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert {name.split(".")[0] for name in names} <= ALLOWED, path


def test_transformers_works_beside_our_kernels():
    """It looks for the hub's `kernels`, finds this folder's, and goes without a word."""
    command = [sys.executable, "-W", "error::ImportWarning", "-c", PLAIN_TRANSFORMERS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "Qwen3ForCausalLM", result.stderr
    assert "kernels" not in result.stderr
