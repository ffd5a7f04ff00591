"""Every numerical tolerance of the test suite, with its reason."""

LOG_PROB = 2e-6
"""fp32 log-probs, absolute: the softmax sums 1e2 terms, in another order on every layout."""
HUGGING_FACE_LOG_PROB = 5e-6
"""The same against transformers, whose attention and expert kernels add in another order, too."""
GRADIENT = 5e-6
"""fp32 gradients, relative to the largest: layouts add the same terms in another order."""
PEFT_LOG_PROB = 1e-6
"""fp32 log-probs against PEFT in float64, relative to the largest: 1.3e-7 was measured, two roundings (6e-8 each)."""
PEFT_GRADIENT = 2e-6
"""The same of gradients, 8e-7 measured: the ratio of policies is the exponential of a log-prob, which fp32 rounds at a
size of 6, so that its relative error is the absolute one of the log-prob."""
PARAMETER = 5e-6
"""fp32 parameters after three Adam steps at 1e-3, absolute: Adam divides by the gradient's size plus 1e-5, so an error
of 5e-7 of the largest gradient (0.1) moves the parameters of small gradients by up to 5e-3 of a step."""
BF16_LOG_PROB = 0.1
"""bfloat16 against fp32: each of four layers rounds activations to 8 bits of mantissa (4e-3 relative)."""
BF16_GRADIENT = 0.1
"""bfloat16 against fp32, relative to the largest gradient; the same rounding, forward and backward."""
BF16_PARAMETER = 8e-3
"""bfloat16 against fp32 after Adam steps of 1e-3: exported weights are rounded to 4e-3 of their size (1), and small
gradients may change sign, which Adam turns into a step in the other direction."""
BF16_TO_HUGGING_FACE = 1.5
"""Error of bfloat16 against fp32 relative to that of transformers' bfloat16: up to 1.0 was measured for log-probs and
1.2 for gradients. Tokens that are routed to other experts determine it."""
ENGINE_LOG_PROB = 1e-4
"""fp32 log-probs of vLLM against another implementation, absolute: other kernels, other attention order."""
PLANNED_ACTIVATIONS = 0.01
"""Relative: the planner leaves out small index tensors; measured up to 0.002 on the tests' tiny models."""
BF16_MEAN_PARAMETER = 2.5e-3
"""Main parameters of a bf16 model against an fp32 one's after two Adam steps at 1e-3, mean absolute difference: where a
gradient is mostly rounding Adam follows its sign."""
BF16_ROUNDED_APART = 1e-3
"""Share of bfloat16 parameters that are rounded to different sides, where fp32 values differ by less than PARAMETER."""
BF16_ENGINE_LOG_PROB = 0.1
"""bfloat16 log-probs of vLLM against another implementation, absolute: up to 0.09 was seen on a CPU."""
FP8_ENGINE_LOG_PROB = 0.5
"""The same with vLLM's weights in FP8: 3 bits of mantissa round them to 6e-2 of their size, in each of three layers."""
BF16_GRADIENT_ROUNDING = 0.02
"""bfloat16 gradients of an output layer against float64 on the same rounded inputs, relative to the largest: logits,
their gradient and the product of each chunk are each rounded to 8 bits (4e-3)."""
BF16_LOGITS_ENTROPY = 5e-4
"""Entropy of bfloat16 logits against float64 from rounded exact logits: the matrix product rounds some logits to the
other side, which changes them by 4e-3 of their size; 8e-6 was measured on a CPU and 1.3e-4 on an H200."""
FUSED_LOSS = 2e-6
"""The objective's kernel in fp32 against float64, relative and absolute: a ratio of size 10 carries its log-ratio's
rounding (2e-7), and the sum is one of 1e2 terms."""
BF16_GRADIENT_NORM = 1e-3
"""Norm of gradients that are summed in bfloat16 against fp32, relative: each element is rounded to 8 bits of mantissa
(4e-3), up or down; 4e-5 was measured."""
BF16_MEAN_LOG_PROB = 1e-2
"""bfloat16 on a GPU against fp32, or fused kernels against plain ones: mean absolute difference of log-probs."""
GPU_GRADIENT_COSINE = 0.95
"""Smallest cosine of a tensor's gradient in bfloat16 and in fp32, or of fused kernels and plain ones: 0.9997
was seen on a CPU without experts, 0.977 with them, where rounding sends some tokens to other ones."""
FP8_MEAN_LOG_PROB = 0.1
"""FP8 training against bfloat16: mean absolute difference of log-probs through four layers, whose products round both
factors to 3 bits of mantissa."""
FP8_K3 = 1e-2
"""The same as a KL divergence: half the mean square of a difference of 0.1."""
FP8_LOSS = 0.05
"""Relative, of each of 20 losses on the same examples."""
