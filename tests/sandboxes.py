"""The mark of tests that run programs in the sandbox."""

import pytest

from megatron_bapo.functions.sandbox import sandbox_problem

PROBLEM = sandbox_problem()
needs_sandbox = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
