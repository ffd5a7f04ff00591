"""`python -m megatron_bapo`."""

from megatron_bapo.cli import app

app(prog_name="megatron-bapo")
