import subprocess
import sys

from megatron_bapo.logs import last_lines

PRINTER = """
import os, sys
from pathlib import Path
from megatron_bapo.logs import redirect_output
print("before")
redirect_output(Path(sys.argv[1]))
print("printed", flush=True)
os.write(2, b"native\\n")
subprocess_code = os.system("echo child")
"""


def test_all_output_of_a_process_its_native_code_and_its_children_goes_to_its_log(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text("earlier run\n")

    done = subprocess.run([sys.executable, "-c", PRINTER, str(log)], capture_output=True, text=True, check=True)

    assert done.stdout == "before\n"
    assert log.read_text() == "earlier run\nprinted\nnative\nchild\n"


def test_the_last_lines_of_a_log_omit_blank_lines_and_replace_invalid_bytes(tmp_path):
    log = tmp_path / "worker.log"
    log.write_bytes(b"first\nsecond\n\n  \nth\xffird\n\n")

    assert last_lines(log, 2) == "second\nth\N{REPLACEMENT CHARACTER}ird"


def test_a_missing_log_has_no_last_lines(tmp_path):
    assert last_lines(tmp_path / "missing.log", 5) == ""
