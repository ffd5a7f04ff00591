"""The rollout service's process imports only what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.rollout.tokenization import load_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
LOADED = """
import sys
from pathlib import Path
import megatron_bapo.controller.rollout_service
from megatron_bapo.rollout.tokenization import load_tokenizer, text_of, transformers_without_torch

with transformers_without_torch():
    tokenizer = load_tokenizer(Path(sys.argv[1]))
text = tokenizer.apply_chat_template([{"role": "user", "content": "6 x 7"}], tokenize=False)
print(type(tokenizer), tokenizer.encode(text), text_of(tokenizer.encode(text), tokenizer))
print("torch" in sys.modules)
import torch
print(torch.ones(2).sum().item())
"""


@pytest.mark.slow
def test_the_rollout_service_loads_the_same_tokenizer_without_torch(tmp_path: Path) -> None:
    written = byte_tokenizer(["abc", "xyz"])
    written.chat_template = TEMPLATE
    written.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    tokenizer = load_tokenizer(tmp_path)
    text = "[user]6 x 7"
    used = f"{type(tokenizer)} {tokenizer.encode(text)} {text}"
    assert done.stdout.splitlines() == [used, "False", "2.0"]
