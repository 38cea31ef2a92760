"""The package beside others: what it imports, and what transformers makes of its name."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {"torch", "triton", "grpo", "config", "kernels"}


def imported_packages(path):
    """Top-level names of everything that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda p: p.name)
def test_kernels_import_torch_triton_and_the_loss_only(path):
    assert imported_packages(path) - set(sys.stdlib_module_names) <= ALLOWED


PLAIN_TRANSFORMERS = """
from transformers import AutoConfig, AutoModelForCausalLM
sizes = dict(vocab_size=11, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, **heads))
print(type(model).__name__)
"""


def run_transformers(*paths):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *paths]))}
    command = [sys.executable, "-W", "error::ImportWarning", "-c", PLAIN_TRANSFORMERS]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_transformers_works_beside_our_kernels():
    """It looks for the hub's `kernels`, finds this folder's, and goes without a word."""
    result = run_transformers()
    assert result.stdout.strip() == "Qwen3ForCausalLM", result.stderr
    assert "kernels" not in result.stderr


def test_the_hubs_kernels_beside_ours_is_one_sentence(tmp_path):
    """Where the hub's package is installed transformers asks ours for its names."""
    utils = pytest.importorskip("transformers.utils.import_utils")
    version = getattr(utils, "KERNELS_MIN_VERSION", None)
    if version is None:
        pytest.skip("this transformers asks for no version of kernels")
    installed = tmp_path / f"kernels-{version}.dist-info"
    installed.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
    (installed / "METADATA").write_text(metadata)
    result = run_transformers(tmp_path)
    assert result.stdout.strip() == "Qwen3ForCausalLM" or "pip uninstall kernels" in result.stderr
