"""Compiles the kernels for a GPU that need not be there, in a process without Triton's interpreter.

Prints a line of JSON: the bytes of each cubin.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_bapo.algorithm import policy_loss_kernel
from megatron_bapo.model import vocab_kernels

HOPPER = GPUTarget("cuda", 90, 32)
FLAGS = ("CORRECTED", "OF_SEQUENCES", "DUAL", "CISPO")
OBJECTIVES = {"bapo": (0, 0, 0, 0), "corrected gspo with dual clip": (1, 1, 1, 0), "corrected cispo": (1, 0, 0, 1)}
ROWS = {"num_rows": "i32", "num_valid_rows": "i32", "temperature": "fp32"}
OF_TOKEN = dict.fromkeys(("max_C", "log_scale_C", "entropy_C", "grad_log_prob_C", "grad_entropy_C"), "*fp32")
SUMS = {"label_C": "*i64", "own_4C": "*fp32", "num_tokens": "i32", **ROWS, "padding_logit": "fp32"}
GRAD_LOGITS = {**OF_TOKEN, "label_C": "*i64", "has_label_C": "*i1", **ROWS}
OBJECTIVE = {
    **dict.fromkeys(("log_probs_T", "behaviour_T", "advantages_T", "weights_T", "correction_T"), "*fp32"),
    **dict.fromkeys(("sequence_log_ratio_T", "low_0", "high_0", "loss_T", "grad_T"), "*fp32"),
    "dual": "fp32",
    "num_tokens": "i32",
}


def compiled(kernel: object, signature: dict[str, str], constants: dict[str, object]) -> int:
    source = ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    options = {"num_warps": vocab_kernels.NUM_WARPS}
    return len(triton.compile(source, target=HOPPER, options=options).asm["cubin"])


def main() -> None:
    logits, block = {"logits_CV": "*bf16"}, {"BLOCK": vocab_kernels.BLOCK}
    sizes = {
        "sums": compiled(vocab_kernels._sums, logits | SUMS, block),
        "gradient": compiled(vocab_kernels._grad_logits, logits | GRAD_LOGITS, block | {"OF_ENTROPY": True}),
    }
    for name, chosen in OBJECTIVES.items():
        constants = {**dict(zip(FLAGS, chosen, strict=True)), "MAX_LOG_RATIO": 20.0, "BLOCK": policy_loss_kernel.BLOCK}
        sizes[name] = compiled(policy_loss_kernel._objective_loss, OBJECTIVE, constants)
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
