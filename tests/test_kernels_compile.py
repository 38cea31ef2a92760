"""Every kernel launch compiled for Ampere, Hopper and Blackwell, on a machine without a GPU.

A process of its own calls the launchers with CPU tensors under a Triton driver that names a GPU and
launches nothing: Triton binds, specialises and compiles each call as a GPU would have it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

import kernels
from kernels import decode, linear_loss, paged
from kernels.backend import INTERPRETED

ROOT = Path(__file__).parent.parent
ARCHITECTURES = (80, 90, 100)  # A100, H100 and H200, B200
# Shared memory of one block, in bytes: what CUDA lets a program ask for.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
BF16 = torch.bfloat16


def install_driver(architecture):
    """Makes Triton compile for `architecture`, with no device behind it."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class NamedTarget(DriverBase):
        def __init__(self):
            pass

        is_active = classmethod(lambda cls: True)
        map_python_to_cpp_type = staticmethod(lambda kind: kind)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
        get_current_target = staticmethod(lambda: GPUTarget("cuda", architecture, 32))
        # Triton keeps what it compiled by the device's number.
        get_current_device = staticmethod(lambda: architecture)
        get_current_stream = staticmethod(lambda device: 0)
        get_benchmarker = staticmethod(lambda: None)  # nothing is timed

    driver.set_active(NamedTarget())


def keep_compiled():
    """From now on a launch compiles only. Returns the list that gets (kernel's name, result)."""
    from triton.runtime.jit import JITFunction

    plain = JITFunction.run
    compiled = []

    def run(self, *args, grid, warmup, **options):
        result = plain(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, result))

    JITFunction.run = run
    return compiled


def launch_attention(Hq, Hkv, Dh, page_size, dtype):
    pages = torch.zeros(4, page_size, Hkv, Dh, dtype=dtype)
    paged.triton_paged_attention(
        torch.zeros(4, Hq, Dh, dtype=dtype),
        pages,
        pages,
        torch.zeros(4, 3, dtype=torch.int32),
        torch.ones(4, dtype=torch.int32),
        scale=Dh**-0.5,
        kv_ranges=torch.zeros(8, paged.RANGE_FIELDS, dtype=torch.int32),
    )


def launch_decode(dtype):
    B, D, Hq, Hkv, Dh, F = 2, 4096, 32, 8, 128, 12288
    x = torch.zeros(B, D, dtype=dtype)
    decode.add_rms_norm(x, None, x[0], 1e-6)
    decode.add_rms_norm(x, x, x[0], 1e-6)
    qkv = torch.zeros(B, (Hq + 2 * Hkv) * Dh, dtype=dtype)
    pages = torch.zeros(4, 16, Hkv, Dh, dtype=dtype)
    slots = torch.zeros(B, dtype=torch.int64)
    head = torch.zeros(Dh, dtype=dtype)
    cos = torch.zeros(B, Dh, dtype=dtype)
    for weight in (head, None):
        decode.qk_norm_rope_store(qkv, weight, weight, cos, cos, slots, pages, pages, 1e-6)
    decode.silu_mul(torch.zeros(B, 2 * F, dtype=dtype))


def launch_loss(V):
    z = torch.zeros(2, V)
    target = torch.zeros(2, dtype=torch.int64)
    number = torch.zeros(2)
    linear_loss.triton_stats(z, target, 0.8)
    linear_loss.triton_gradient(z, target, number, number, 0.8, BF16)


LAUNCHES = {
    "attention in fp32": partial(launch_attention, 8, 2, 128, 16, torch.float32),
    "decode": partial(launch_decode, BF16),
    "decode in fp16": partial(launch_decode, torch.float16),
    "loss": partial(launch_loss, 151_936),
    "loss, odd vocabulary": partial(launch_loss, 151_937),
}
# Query heads, key heads, head size and page size: Qwen3-8B and Llama twice, a small Qwen, the toy.
for shape in [(32, 8, 128, 16), (32, 8, 128, 256), (12, 12, 64, 256), (8, 4, 32, 32)]:
    name = "attention {}/{} heads of {}, pages of {}".format(*shape)
    LAUNCHES[name] = partial(launch_attention, *shape, BF16)


def usage(cubin):
    """Registers, stack and local memory (spills) of a compiled kernel."""
    tool = Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dump.stdout))
    return {name: int(number) for name, number in found.items()}


def compile_all():
    """A record of every launch: its name, kernel, architecture, resources and code."""
    decode.use_triton = lambda tensor: True
    compiled = keep_compiled()
    records = []
    for architecture in ARCHITECTURES:
        install_driver(architecture)
        for name, launch in LAUNCHES.items():
            compiled.clear()
            launch()
            for kernel, result in compiled:
                record = {"launch": name, "kernel": kernel, "architecture": architecture}
                record |= {"shared": result.metadata.shared, **usage(result.asm["cubin"])}
                record |= {code: result.asm[code] for code in ("ttir", "ttgir", "ptx")}
                records.append(record)
    return records


@pytest.fixture(scope="module")
def records():
    if kernels.triton is None or sys.platform != "linux":
        pytest.skip("needs Triton's compiler")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, __file__], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def of(records, *kernels):
    found = [record for record in records if record["kernel"] in kernels]
    assert len({record["kernel"] for record in found}) == len(kernels)
    return found


def label(record):
    return f"{record['kernel']} of {record['launch']} for sm_{record['architecture']}"


def test_every_kernel_is_compiled(records):
    for architecture in ARCHITECTURES:
        names = {r["kernel"] for r in records if r["architecture"] == architecture}
        modules = (paged, decode, linear_loss)
        assert names == {name for module in modules for name in vars(module) if "_kernel" in name}


def test_no_register_spills_and_shared_memory_fits(records):
    """Also into what the waves of the attention are planned with."""
    for record in records:
        assert record["STACK"] == record["LOCAL"] == 0, label(record)
        assert record["shared"] <= SHARED_LIMIT[record["architecture"]], label(record)
        # CUDA takes 1 KB of each program's share for itself.
        if record["kernel"] == "split_kernel" and "fp32" not in record["launch"]:
            assert record["shared"] + 1024 <= paged.PROGRAM_BYTES, label(record)


def test_page_offsets_are_64_bits(records):
    """A pool passes 2³¹ elements: what is added to the pages' pointers is i64."""
    for record in of(records, "split_kernel", "qk_norm_rope_store_kernel"):
        copies = re.findall(r"(%\w+) = tt\.splat %[kv]_pages_ptr ", record["ttir"])
        bases = "|".join([*copies, "%k_pages_ptr", "%v_pages_ptr"])
        offsets = re.findall(rf"tt\.addptr (?:{bases}), .*?(i\d+)>? loc", record["ttir"])
        assert offsets == ["i64", "i64"], (label(record), offsets)


def test_products_of_the_rotation_are_rounded_before_they_are_added(records):
    """As transformers does: one fused operation would round once. sm_80 multiplies by fma."""
    for record in of(records, "qk_norm_rope_store_kernel"):
        if record["architecture"] >= 90:
            assert re.search(r"mul(\.rn)?\.b?f16", record["ptx"]), label(record)
            assert not re.search(r"fma\.rn\.b?f16", record["ptx"]), label(record)


def test_row_offsets_of_the_loss_are_64_bits(records):
    """N·V passes 2³¹: every offset of a row is computed and added as i64."""
    for record in of(records, "stats_kernel", "gradient_kernel"):
        ttir = record["ttir"]
        assert re.search(r"arith\.muli .* : i64", ttir), label(record)
        assert not re.search(r"arith\.muli .* : i32", ttir), label(record)
        offsets = re.findall(r"tt\.addptr .* : !tt\.ptr<\w+>, (i\d+)", ttir)
        assert offsets and set(offsets) == {"i64"}, label(record)


def test_block_is_read_before_any_thread_writes(records):
    """dz takes the place of z: in the loop all loads come first, then the barrier, then stores.

    Loads are of 16 bytes, where the length of a row allows it.
    """
    for record in of(records, "gradient_kernel"):
        if record["launch"] == "loss":
            order = re.findall(r"ld\.global\.v4|bar\.sync|st\.global", record["ptx"])
            shape = r"(ld\.global\.v4 )+bar\.sync (st\.global )+"
            assert re.fullmatch(shape, " ".join(order) + " "), label(record)


if __name__ == "__main__":
    assert not INTERPRETED, "unset TRITON_INTERPRET"
    print(json.dumps(compile_all()))
