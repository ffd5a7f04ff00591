"""Serve MLflow's own tracking server on the loopback interface: python mlflow_server.py DATABASE PORT.

`mlflow server` itself needs more packages than mlflow-skinny has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

database, port = Path(sys.argv[1]), int(sys.argv[2])
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{database}"
os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = str(database.parent / "artifacts")

from mlflow.server import app  # noqa: E402
from mlflow.server.handlers import initialize_backend_stores  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

initialize_backend_stores(os.environ["_MLFLOW_SERVER_FILE_STORE"], default_artifact_root=str(database.parent))
server = make_server("127.0.0.1", port, app)
print("listens", flush=True)
server.serve_forever()
