"""Entry point of `python -m megatron_bapo`."""

from megatron_bapo.cli.main import app

app(prog_name="megatron-bapo")
