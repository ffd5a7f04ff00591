"""The command lines of tools/: what they print and how they end."""

import json
import resource
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_bapo.model.hf_create import byte_tokenizer
from tests.unit.trainer.test_conversion import save_multimodal

TOOLS = Path(__file__).parents[2] / "tools"
NEW_TOOLS = (
    "convert_hf_to_megatron",
    "convert_megatron_to_hf",
    "dequantize_mxfp4",
    "extract_text_model",
    "prepare_data",
)
TOOLS_WITH_CODES = (*NEW_TOOLS, "simulate_rollouts")


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> int:
    """The tool's exit code."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + 1?", "answer": n + 1}) + "\n" for n in (1, 2, 2, 30)))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=18, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", TOOLS_WITH_CODES)
def test_help_names_the_exit_codes(monkeypatch, capsys, name):
    assert run(monkeypatch, name, "--help") == 0
    assert "Exit codes: 0" in capsys.readouterr().out


@pytest.mark.parametrize("name", NEW_TOOLS)
def test_a_wrong_input_is_named_with_exit_code_2(monkeypatch, capsys, tmp_path, name):
    missing = tmp_path / "missing.jsonl"
    assert run(monkeypatch, name, missing, "--output", tmp_path / "out.jsonl") == 2
    assert str(missing) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_output_that_the_system_refuses_to_write_is_named_with_exit_code_2(monkeypatch, capsys, tmp_path, model):
    arguments = (model, "--output", tmp_path / "out")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        assert run(monkeypatch, "convert_hf_to_megatron", *arguments) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    message = f"error: --output {tmp_path / 'out'} cannot be written to (File too large); raise the limit on the size"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(monkeypatch, "convert_hf_to_megatron", *arguments) == 0


def test_a_model_goes_to_a_checkpoint_and_back(monkeypatch, capsys, tmp_path, model):
    checkpoint, back = tmp_path / "run" / "checkpoints" / "step-00000000", tmp_path / "back"
    assert run(monkeypatch, "convert_hf_to_megatron", model, "--output", checkpoint) == 0
    arguments = (tmp_path / "run", "--origin-hf-dir", model, "--output", back)
    assert run(monkeypatch, "convert_megatron_to_hf", *arguments) == 0
    assert run(monkeypatch, "convert_megatron_to_hf", *arguments) == 0

    printed = capsys.readouterr().out
    assert f"{checkpoint}: 14 tensors (to float32)" in printed
    assert f"{back}: 14 tensors (float32 to float32)" in printed
    assert "1 file, 1 existed already; verified bit by bit against the source" in printed


def test_an_extracted_model_says_that_it_is_rounded(monkeypatch, capsys, tmp_path):
    source = save_multimodal(tmp_path / "source", "qwen3_5", stacked=False)
    verified = {"bfloat16": "against the source, rounded to bfloat16", "float32": "bit by bit against the source"}
    for dtype, how in verified.items():
        assert run(monkeypatch, "extract_text_model", source, "--output", tmp_path / dtype, "--dtype", dtype) == 0
        assert f" tensors (to {dtype}), " in (printed := capsys.readouterr().out)
        assert printed.endswith(f"; verified {how}\n")

    rounded, exact = (load_file(next((tmp_path / dtype).glob("*.safetensors"))) for dtype in verified)
    for name in ("A_log", "norm.weight"):
        name = f"model.layers.0.linear_attn.{name}"
        assert exact[name].dtype == torch.float32
        assert torch.equal(rounded[name], exact[name].bfloat16())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_megatron_becomes_the_model_it_came_from(monkeypatch, capsys, tmp_path, model):
    weights = load_file(model / "model.safetensors")
    layer = {name.removeprefix("model.layers.0."): tensor for name, tensor in weights.items() if ".layers." in name}
    stacked = {
        "self_attention.linear_qkv.layer_norm_weight": layer["input_layernorm.weight"],
        # There is one key/value head, so its queries, key and value follow each other.
        "self_attention.linear_qkv.weight": torch.cat([layer[f"self_attn.{part}_proj.weight"] for part in "qkv"]),
        "self_attention.q_layernorm.weight": layer["self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": layer["self_attn.k_norm.weight"],
        "self_attention.linear_proj.weight": layer["self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": layer["post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]),
        "mlp.linear_fc2.weight": layer["mlp.down_proj.weight"],
    }
    tensors = {f"decoder.layers.{name}": tensor[None] for name, tensor in stacked.items()} | {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "output_layer.weight": weights["lm_head.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    torch.distributed.checkpoint.save(tensors, checkpoint_id=megatron / "iter_0000012", no_dist=True)
    (megatron / "latest_checkpointed_iteration.txt").write_text("12")
    (model / "model.safetensors").unlink()  # of the origin, only config.json and the tokenizer are needed

    assert run(monkeypatch, "convert_megatron_to_hf", megatron, "--output", back) == 2
    assert "as --origin-hf-dir, whose weights are not needed" in capsys.readouterr().err
    arguments = (megatron, "--origin-hf-dir", model, "--output", back)
    assert run(monkeypatch, "convert_megatron_to_hf", *arguments, "--adapter") == 2
    assert "convert it without --adapter" in capsys.readouterr().err
    assert run(monkeypatch, "convert_megatron_to_hf", *arguments) == 0
    assert f"{back}: 14 tensors (to float32)" in capsys.readouterr().out

    written = load_file(next(back.glob("*.safetensors")))
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())


def test_prompts_are_prepared_and_then_pass_the_check(monkeypatch, capsys, tmp_path, rows):
    byte_tokenizer(["abc"]).save_pretrained(tmp_path / "model")
    limits = ("--tokenizer", tmp_path / "model", "--no-chat-template", "--max-prompt-length", 6)
    output = tmp_path / "train.parquet"

    assert run(monkeypatch, "prepare_data", rows, *limits, "--check") == 1
    assert run(monkeypatch, "prepare_data", rows, *limits, "--output", output) == 0
    assert "train.parquet: written and verified" in capsys.readouterr().out
    assert run(monkeypatch, "prepare_data", output, *limits, "--check", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert {name: number for name, number in printed["counts"].items() if number} == {"rows": 2, "kept": 2}
    assert (printed["tokens"]["total"], printed["dropped"]) == (12, [])


def test_choices_are_written_into_the_prompts(monkeypatch, tmp_path):
    columns = ("Correct Answer", "Incorrect Answer 1")
    rows, output = tmp_path / "gpqa.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"Question": "1 + 1?", columns[0]: "2", columns[1]: "3", "options": ["3", "2"]}) + "\n")
    keys = (rows, "--prompt-key", "Question", "--label-key", columns[0], "--output", output)

    assert run(monkeypatch, "prepare_data", *keys, "--choices-key", *columns) == 0
    ((text, letter),) = written_choices(output)
    assert text in ("1 + 1?\n\nA. 2\nB. 3", "1 + 1?\n\nA. 3\nB. 2")
    assert f"{letter}. 2" in text
    assert run(monkeypatch, "prepare_data", *keys, "--choices-key", "options") == 0
    assert written_choices(output) == [("1 + 1?\n\nA. 3\nB. 2", "B")]


def written_choices(path: Path) -> list[tuple[str, str]]:
    rows = map(json.loads, path.read_text().splitlines())
    return [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows]


def test_json_says_why_each_row_is_left_out(monkeypatch, capsys, tmp_path, rows):
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text('{"prompt": "30+1?", "answer": 31}\n')

    assert run(monkeypatch, "prepare_data", rows, "--eval", evaluation, "--json", "--output", tmp_path / "x.jsonl") == 0

    dropped = json.loads(capsys.readouterr().out)["dropped"]
    assert dropped == [
        {"where": f"{rows}:3", "reason": "duplicate", "detail": f"of {rows}:2"},
        {"where": f"{rows}:4", "reason": "contaminated_exact", "detail": f"with {evaluation}:1"},
    ]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/dev/null/x.jsonl", "--output /dev/null/x.jsonl cannot be written to (File exists: /dev/null)"),
        ("folder.jsonl", "is a folder; name a file in it"),
        ("x.csv", "the name must end in .parquet or .jsonl"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_rows_are_read(
    monkeypatch, capsys, tmp_path, output, message
):
    (tmp_path / "folder.jsonl").mkdir()
    assert run(monkeypatch, "prepare_data", tmp_path / "never-read.jsonl", "--output", tmp_path / output) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["input", "eval"])
def test_a_file_that_is_read_is_not_replaced(monkeypatch, capsys, rows, option):
    before = rows.read_text()
    inputs = (rows,) if option == "input" else (rows.with_name("never-read.jsonl"), "--eval", rows)
    assert run(monkeypatch, "prepare_data", *inputs, "--output", rows) == 2
    assert f"--output {rows} is one of the files that are read; name another file" in capsys.readouterr().err
    assert rows.read_text() == before


@pytest.mark.parametrize("package", ["nowhere", "nowhere.inside", ""])
def test_a_package_that_is_not_there_is_named(monkeypatch, tmp_path, package):
    monkeypatch.setattr(sys, "argv", ["convert_gguf.py", "--package", package, "--output", str(tmp_path / "model")])
    with pytest.raises(SystemExit, match=f"there is no installed package {package!r}"):
        runpy.run_path(str(TOOLS / "convert_gguf.py"), run_name="__main__")


def test_variables_of_the_chat_template_count_as_in_the_run(monkeypatch, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}')
    tokenizer = byte_tokenizer(["abc"])
    tokenizer.chat_template = "{{ messages[0].content }}{{ ending }}"
    tokenizer.save_pretrained(tmp_path / "model")
    counting = ("prepare_data", tmp_path / "rows.jsonl", "--check", "--tokenizer", tmp_path / "model", "--json")
    lengths = []
    for variables in ({}, {"ending": "!!!"}):
        assert run(monkeypatch, *counting, "--chat-template-kwargs", json.dumps(variables)) == 0
        lengths.append(json.loads(capsys.readouterr().out)["tokens"]["total"])
    assert lengths[1] == lengths[0] + 3
    assert run(monkeypatch, *counting, "--chat-template-kwargs", "[1]") == 2
    assert "argument --chat-template-kwargs: invalid json_object value: '[1]'" in capsys.readouterr().err


def test_a_length_limit_needs_a_tokenizer(monkeypatch, capsys, rows):
    assert run(monkeypatch, "prepare_data", rows, "--max-prompt-length", 5, "--check") == 2
    assert "needs --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04"])
def test_a_file_that_is_not_gguf_is_named(monkeypatch, tmp_path, data):
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    monkeypatch.setattr(sys, "argv", ["convert_gguf.py", "--gguf", str(file), "--output", str(tmp_path / "model")])
    with pytest.raises(SystemExit, match=f"error: {file} is not a GGUF file, which starts with the bytes GGUF"):
        runpy.run_path(str(TOOLS / "convert_gguf.py"), run_name="__main__")


def test_the_page_of_keys_is_what_its_command_prints() -> None:
    from tools.config_reference import reference

    assert (TOOLS.parent / "docs" / "reference" / "configuration.md").read_text() == reference()
