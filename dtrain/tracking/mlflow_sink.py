"""MLflow as a sink: one MLflow run over all restarts, with each record once.

* The *run id* is kept in ``<run.dir>/mlflow/run.json``; every start uses it. If MLflow does not have that run (a different
  server, or it was deleted), a new one is created and gets the records of all starts.
* The newest record that MLflow has is read from its run. Later ones are sent from metrics.jsonl and the media folder; a
  step that a resumed run repeats is not sent again.
* A database that is a local file is created in a temporary folder and copied to its place when it is complete, because a kill
  leaves MLflow's tables half made, and MLflow cannot open them again. A lock keeps other runs from opening it meanwhile.
* A server that does not answer is asked again until the run ends; meanwhile records wait in the queue.

The sink may block and raise; ``BackgroundSink`` keeps that away from the training.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from dtrain.distributed.lock import file_lock
from dtrain.errors import without_secrets_in
from dtrain.files import replace_file
from dtrain.runs.records import Mark, MediaFile, Record, finite_metrics, has_evaluation, mark, send_earlier
from dtrain.tracking.provenance import provenance

# MLflow sends usage statistics from its import on, and waits several minutes for a server that does not answer.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient, get_tracking_uri

if TYPE_CHECKING:
    from dtrain.config.schema import TrackerConfig

#: Seconds between two attempts to reach a server that does not answer.
RETRY_SECONDS = 5.0
#: After this many seconds without a change, no process is creating the database any more.
ABANDONED_SECONDS = 5.0
_AWAY = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "DEADLINE_EXCEEDED", "REQUEST_LIMIT_EXCEEDED")
_GONE = "RESOURCE_DOES_NOT_EXIST"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # of one request
_LONGEST_NAME, _LONGEST_VALUE, _LONGEST_TAG = 250, 6000, 5000  # characters
_NOT_IN_NAMES = re.compile(r"[^\w./: -]", re.ASCII)
_Result = TypeVar("_Result")


class MlflowSink:
    """A run of MLflow.

    Args:
        tracker: The group ``tracker`` of the config.
        run_dir: The run's directory.
        run_name: The name that MLflow shows.
        config: The resolved config, without secrets, in plain containers.
        resumed_step: The last step of earlier starts in metrics.jsonl.
        note: Shows a sentence to a person.
        media: The media of earlier starts.

    Attributes:
        run_id: MLflow's id of the run.

    Raises:
        MlflowException, OSError, ValueError: Here and in all methods, if MLflow cannot continue.
        ImportError: If the driver of a database is not installed.
        sqlalchemy.exc.SQLAlchemyError: If a database of a server refuses.
    """

    def __init__(
        self,
        tracker: TrackerConfig,
        run_dir: Path,
        run_name: str,
        config: dict[str, Any],
        resumed_step: int,
        note: Callable[[str], None],
        media: Sequence[MediaFile] = (),
    ) -> None:
        # They report the creation of the local database; and MLflow prints the tracebacks of errors that it also raises.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)
        self._note = note
        self._reported: set[str] = set()
        kept = run_dir / "mlflow" / "run.json"
        earlier = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        chosen = tracker.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
        # The default depends on the working directory, so a resumed run continues in the store that it has.
        uri = chosen or earlier.get("default_uri") or get_tracking_uri()
        self._client = self._ask(lambda: _client(uri, note))
        self.run_id = self._continued(earlier.get("run_id")) or self._created(tracker, run_name)
        kept.parent.mkdir(exist_ok=True)
        with replace_file(kept) as file:
            # A URI that the user gives may contain a password.
            file.write(json.dumps({"run_id": self.run_id} | ({} if chosen else {"default_uri": uri})).encode())
        self._sent = self._describe(config)
        note(f"mlflow: {uri}, experiment {tracker.project}, run id {self.run_id}")
        send_earlier(self, run_dir / "metrics.jsonl", resumed_step, media)

    def log(self, record: Record) -> None:
        """Sends the finite values of one record, unless MLflow has it already."""
        if mark(record) <= self._sent:
            return
        step, milliseconds = int(record["step"]), round(1000 * float(record["time"]))
        metrics = (
            Metric(_name(name), float(value), milliseconds, step) for name, value in finite_metrics(record).items()
        )
        for some in _pieces(metrics, _MOST_METRICS):
            self._ask(lambda some=some: self._client.log_batch(self.run_id, metrics=some))  # type: ignore[misc]

    def media(self, step: int, name: str, path: Path) -> None:
        """Uploads a picture or a text to the artifacts ``media/<name>``."""
        if (step, True) >= self._sent:
            self._upload(lambda: self._client.log_artifact(self.run_id, str(path), f"media/{name}"))

    def alert(self, text: str) -> None:
        """Does nothing: MLflow has no alerts."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Sets the status: ``FINISHED``, ``KILLED`` for a stopped run, ``FAILED``; and the reason as a tag."""
        if reason is not None:
            self._ask(lambda: self._client.set_tag(self.run_id, "reason", reason[:_LONGEST_TAG]))
        self._ask(lambda: self._client.set_terminated(self.run_id, _STATUS[state]))

    def _continued(self, run_id: str | None) -> str | None:
        """The id of an earlier start if MLflow has this run."""
        if run_id is None:
            return None
        try:
            run = self._ask(lambda: self._client.get_run(run_id))
        except MlflowException as error:
            if error.error_code != _GONE:
                raise
            run = None
        if run is None or run.info.lifecycle_stage != "active":
            self._note(
                f"mlflow: run {run_id} of the earlier start is not here (deleted, or a different store); a new run begins."
            )
            return None
        self._ask(lambda: self._client.update_run(run_id, status="RUNNING"))
        return run_id

    def _created(self, tracker: TrackerConfig, run_name: str) -> str:
        def create() -> str:
            client = self._client
            experiment = client.get_experiment_by_name(tracker.project)
            number = experiment.experiment_id if experiment else client.create_experiment(tracker.project)
            return str(
                client.create_run(number, tags=dict.fromkeys(tracker.tags, "true"), run_name=run_name).info.run_id
            )

        try:
            return self._ask(create)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run has created the experiment at this moment
                raise
            return self._ask(create)

    def _describe(self, config: dict[str, Any]) -> Mark:
        """Sends config and provenance. Returns the mark of the newest record that MLflow has."""
        data = self._ask(lambda: self._client.get_run(self.run_id)).data
        # MLflow refuses to change a parameter. The file config.yaml comes from the newest start.
        new = {_name(key): value[:_LONGEST_VALUE] for key, value in _flat(config)}
        params = (Param(key, value) for key, value in new.items() if key not in data.params)
        for some in _pieces(params, _MOST_PARAMS):
            self._ask(lambda some=some: self._client.log_batch(self.run_id, params=some))  # type: ignore[misc]
        tags = [RunTag(name, str(value)[:_LONGEST_TAG]) for name, value in provenance(Path.cwd()).items()]
        self._ask(lambda: self._client.log_batch(self.run_id, tags=tags))
        text = yaml.safe_dump(config, sort_keys=False)
        self._upload(lambda: self._client.log_text(self.run_id, text, "config.yaml"))
        newest = ((int(metric.step), has_evaluation([metric.key])) for metric in data.to_proto().metrics)
        return max(newest, default=(-1, False))

    def _upload(self, upload: Callable[[], object]) -> None:
        """Uploads an artifact. Artifacts may have their own store, so an error does not end the sink."""
        try:
            upload()
        except Exception as error:  # noqa: BLE001 - of the clients of S3, Azure and others
            self._note_once(f"mlflow: an artifact could not be uploaded ({_brief(error)})")

    def _ask(self, function: Callable[[], _Result]) -> _Result:
        """Calls until the server answers.

        Raises:
            MlflowException: If the server refuses.
        """
        while True:
            try:
                return function()
            except MlflowException as error:
                if error.error_code not in _AWAY:
                    raise
                reason = _brief(error)
                self._note_once(f"mlflow: no answer; trying again until the run ends ({reason})")
                time.sleep(RETRY_SECONDS)

    def _note_once(self, text: str) -> None:
        kind = text.partition("(")[0]
        if kind not in self._reported:
            self._note(text)
        self._reported.add(kind)


# -- local databases


def _client(uri: str, note: Callable[[str], None]) -> MlflowClient:
    """MLflow's client. A database that is a local file is created, completed or upgraded by one process at a time.

    Raises:
        ValueError: If the file is not a database of MLflow, or it cannot be created, written or upgraded.
    """
    if not uri.startswith("sqlite"):
        return MlflowClient(uri)
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError

    database = make_url(uri).database
    if not database or database == ":memory:" or database.startswith("file:"):
        return MlflowClient(uri)
    path = Path(database).resolve()  # follows a link, which would otherwise be replaced
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_name(f"{path.name}.lock")):
            _set_aside_half_made(path, note)
            if not _holds_data(path):
                _create(path)
            return MlflowClient(uri)
    except (OSError, sqlite3.Error, SQLAlchemyError) as error:
        reason = _brief(error)
        raise ValueError(
            f"{path} cannot be opened or created as a database of MLflow ({reason}). Correct this, rename the file, or set "
            "tracker.mlflow_uri to a different one"
        ) from error


def _holds_data(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _create(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        complete = Path(folder) / "mlflow.db"
        MlflowClient(f"sqlite:///{complete}").search_experiments()
        if not _holds_data(path):  # a program that does not know the lock may have created it
            with replace_file(path) as file:
                file.write(complete.read_bytes())


def _set_aside_half_made(path: Path, note: Callable[[str], None]) -> None:
    """Renames a database whose creation was interrupted. Waits while a program without the lock is creating it."""
    before = None
    while _holds_data(path) and _is_half_made(path):
        status = path.stat()
        now = status.st_ino, status.st_mtime_ns
        if now == before:
            aside = path.with_name(f"{path.name}.incomplete-{secrets.token_hex(4)}")
            path.rename(aside)
            note(
                f"mlflow: {path} was not created completely and has no runs. It was renamed to {aside.name}; a new one follows."
            )
            return
        before = now
        time.sleep(ABANDONED_SECONDS)


def _is_half_made(path: Path) -> bool:
    """Whether a database has tables of MLflow and no experiment, which MLflow adds at the end of the creation."""
    with closing(sqlite3.connect(path, timeout=60)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        found = [name for name in ("experiments", "registered_models") if name in tables]
        return "experiments" in found and not any(
            database.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() for name in found
        )


def _brief(error: Exception) -> str:
    """The beginning of a message. Secrets are hidden first, because half a URL is not recognised as one."""
    return without_secrets_in(" ".join(str(error).split()))[:300]


def _name(name: str) -> str:
    """A name of a metric or parameter with the characters that MLflow allows, such as ``eval/acc_5`` for ``eval/acc@5``."""
    return posixpath.normpath(_NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]).lstrip("./") or "_"


def _flat(config: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys as on the command line, such as ``optimizer.lr``, with their values."""
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, str(config)


def _pieces(values: Iterator[_Result], most: int) -> Iterator[list[_Result]]:
    while piece := list(islice(values, most)):
        yield piece
