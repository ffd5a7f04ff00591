import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_bapo.config.loading import load_config
from megatron_bapo.config.logging import MlflowConfig
from megatron_bapo.errors import UserError
from tests.unit.config.examples import config, problems


def test_without_wandb_a_run_that_reports_to_it_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of the same name, which Python takes for a namespace package, does not count."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (problem,) = problems(config(logging__wandb={"project": "p"}))
    assert "logging.wandb needs the package wandb, which is not installed: pip install wandb" in problem


def test_without_mlflow_a_run_that_reports_to_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server, MLflow also needs the packages for its database."""
    for module in ("mlflow", "sqlalchemy", "alembic"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", [])
    package, database = problems(config(logging__mlflow={"experiment": "e"}))
    assert (
        "logging.mlflow needs the package mlflow-skinny, which is not installed: pip install mlflow-skinny" in package
    )
    assert "logging.mlflow without a tracking server needs the packages sqlalchemy alembic, which are not" in database
    for uri in ("https://mlflow.example.com", "databricks"):
        assert problems(config(logging__mlflow={"experiment": "e", "tracking_uri": uri})) == [package]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert problems(config(logging__mlflow={"experiment": "e"})) == [package]
        monkeypatch.delenv("MLFLOW_TRACKING_URI")


def test_profiled_ranks_must_exist() -> None:
    (problem,) = problems(config(parallel__world_size=2, logging__profile_ranks=[0, 2]))
    assert "logging.profile_ranks=[0, 2] must be trainer ranks, which are 0 to 1" in problem


def test_without_a_uri_mlflow_writes_to_the_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert MlflowConfig(experiment="e").resolved_uri(Path("/runs/one")) == "sqlite:////runs/one/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:word@host")
    assert MlflowConfig(experiment="e").resolved_uri(Path("/runs/one")) == "https://me:word@host"
    own = MlflowConfig(experiment="e", tracking_uri="sqlite:///mlflow.db")
    assert own.resolved_uri(Path("/runs/one")) == "sqlite:///mlflow.db"


@pytest.mark.parametrize(
    "uri", ["https://me:s3cret@host", "https://host?token=s3cret", "postgresql://me:s3cret@host/db"]
)
def test_a_uri_with_credentials_is_refused_and_not_repeated(uri: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run_dir: runs/one\n")
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / "run.yaml", ["logging.mlflow.experiment=e", f"logging.mlflow.tracking_uri={uri}"])
    message = str(caught.value)
    assert "logging.mlflow.tracking_uri has a user or a query, which config.yaml and logs would show" in message
    assert "MLFLOW_TRACKING_PASSWORD" in message
    assert "tracking_uri=" in message
    assert "***" in message
    assert "s3cret" not in message


@pytest.mark.parametrize("uri", ["file:///runs/mlruns", "mlruns", "", "httpx://host"])
def test_a_uri_of_another_kind_is_refused(uri: str) -> None:
    with pytest.raises(ValidationError, match="must start with one of http, https, databricks, sqlite"):
        MlflowConfig(experiment="e", tracking_uri=uri)


def test_tags_have_names_that_mlflow_takes() -> None:
    assert MlflowConfig(experiment="e", tags={"team.name": "a/b"}).tags == {"team.name": "a/b"}
    with pytest.raises(ValidationError, match="tags"):
        MlflowConfig(experiment="e", tags={"a\nb": "c"})
