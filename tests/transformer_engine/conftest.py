"""Warnings of Megatron-Core and Transformer Engine about their own defaults and names are no errors here."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for category in ("UserWarning", "DeprecationWarning", "FutureWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}")
