"""Compiles the kernels for GPUs that need not be there, in a process without Triton's interpreter.

Prints a line of JSON: for each GPU architecture and kernel variant the registers of a thread, the spilled bytes, the
shared memory of a block and whether offsets into the logits are 64-bit.
"""

import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from megatron_bapo.algorithm import policy_loss_kernel
from megatron_bapo.model import vocab_kernels

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
"""A100, H100 and H200, B200."""
FLAGS = ("CORRECTED", "OF_SEQUENCES", "DUAL", "WEIGHTED", "SOFT")
ROWS = {"num_rows": "i32", "num_valid_rows": "i32", "inverse_temperature": "fp32"}
OF_TOKEN = dict.fromkeys(("max_C", "log_scale_C", "entropy_C", "grad_log_prob_C", "grad_entropy_C"), "*fp32")
SUMS = {"label_C": "*i64", "own_4C": "*fp32", "num_tokens": "i32", **ROWS, "padding_logit": "fp32"}
GRAD_LOGITS = {**OF_TOKEN, "label_C": "*i64", "has_label_C": "*i1", **ROWS}
OBJECTIVE = {
    **dict.fromkeys(("log_probs_T", "behaviour_T", "advantages_T", "weights_T", "correction_T"), "*fp32"),
    **dict.fromkeys(("sequence_log_ratio_T", "low_0", "high_0", "loss_T", "grad_T"), "*fp32"),
    **dict.fromkeys(("dual", "tau_pos", "tau_neg"), "fp32"),
    "num_tokens": "i32",
}


def compiled(kernel: object, signature: dict[str, str], constants: dict[str, Any], capability: int) -> dict[str, Any]:
    source = ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    options = {"num_warps": vocab_kernels.NUM_WARPS}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _usage(built.asm["ptx"], capability)
    return {
        "registers": registers,
        "spilled": spilled,
        "shared": built.metadata.shared,
        "offsets_64_bit": bool(re.search(r"arith\.muli .* : i64", built.asm["ttir"])),
    }


def _usage(ptx: str, capability: int) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it spills, as the assembler reports them."""
    architecture = re.search(r"\.target (sm_\w+)", ptx)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture[1]}", file, "-o", f"{file}.o"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", printed), re.search(r"(\d+) bytes spill stores", printed)
    assert registers is not None, printed
    return int(registers[1]), int(spilled[1]) if spilled else 0


def main() -> None:
    found = {}
    for target, capability in TARGETS.items():
        for dtype in "bf16", "fp32":
            logits, block = {"logits_CV": f"*{dtype}"}, {"BLOCK": vocab_kernels.BLOCK}
            tile = block | {"NUM_BLOCKS": vocab_kernels.NUM_BLOCKS}
            found[f"{target} log-probs {dtype}"] = compiled(vocab_kernels._sums, logits | SUMS, tile, capability)
            for of_entropy in False, True:
                name = f"{target} gradient {dtype}{' with entropy' * of_entropy}"
                constants = block | {"OF_ENTROPY": of_entropy}
                found[name] = compiled(vocab_kernels._grad_logits, logits | GRAD_LOGITS, constants, capability)
        for chosen in itertools.product((0, 1), repeat=len(FLAGS)):
            flags = dict(zip(FLAGS, chosen, strict=True))
            if flags["WEIGHTED"] + flags["SOFT"] + max(flags["OF_SEQUENCES"], flags["DUAL"]) > 1:
                continue  # they are of different objectives
            name = " ".join([target, "loss", *(flag.lower() for flag, is_set in flags.items() if is_set)])
            constants = {**flags, "MAX_LOG_RATIO": 20.0, "BLOCK": policy_loss_kernel.BLOCK}
            found[name] = compiled(policy_loss_kernel._objective_loss, OBJECTIVE, constants, capability)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
