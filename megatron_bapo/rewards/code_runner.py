"""Program of the sandbox: executes /program.py for one test. It does not import this package.

    python code_runner.py script    execute it as the main program
    python code_runner.py call      read {"function", "arguments"} as JSON, and write the function's result as JSON
    python code_runner.py assert    read {"statement", "passed"} as JSON, and write `passed` after the statement

`call` and `assert` read from the standard input and write to the standard output. What the program itself prints goes
to the standard error.
"""

import contextlib
import importlib
import json
import os
import sys
from typing import Any

MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
"""Modules that solutions use, and whose names they use, without importing them; later names replace earlier ones.

They are those of LiveCodeBench (lcb_runner/evaluation/testing_util.py).
"""
RECURSION_LIMIT = 50_000


def main(mode: str) -> None:
    request: dict[str, Any] = {} if mode == "script" else json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w")
    if mode != "script":
        os.dup2(2, 1)
    names: dict[str, Any] = {}
    for module in MODULES:
        exec(f"from {module} import *", names)
    names |= {module: importlib.import_module(module) for module in MODULES}
    names["__name__"] = "__main__" if mode == "script" else "program"
    sys.setrecursionlimit(RECURSION_LIMIT)
    with open("/program.py", encoding="utf-8") as file, contextlib.suppress(SystemExit):
        exec(compile(file.read(), "program.py", "exec"), names)
    if mode == "call":
        owner = names["Solution"]() if "Solution" in names else None
        name = request["function"]
        function = getattr(owner, name) if owner is not None and hasattr(owner, name) else names[name]
        json.dump(function(*request["arguments"]), results)
    elif mode == "assert":
        exec(request["statement"], names)
        results.write(request["passed"])
    results.flush()


if __name__ == "__main__":
    main(sys.argv[1])
