"""``logs/rank-00000.log``: what each rank has to say, kept apart and kept over restarts."""

from __future__ import annotations

import logging
from pathlib import Path

from dtrain.config.run import without_url_secrets

logger = logging.getLogger("dtrain")


def open_rank_log(run_dir: Path, rank: int) -> None:
    """Sends the ``dtrain`` logger to this rank's file, appending, and nowhere else; the folder exists.

    Raises:
        OSError: If the file cannot be written.
    """
    close_rank_log()
    handler = logging.FileHandler(run_dir / "logs" / f"rank-{rank:05d}.log", encoding="utf-8")
    handler.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def close_rank_log() -> None:
    """Closes the file, if one is open."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


class _WithoutSecrets(logging.Formatter):
    """Hides those of URLs, which storage likes to name in its errors; tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return without_url_secrets(super().format(record))
