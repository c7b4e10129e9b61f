"""``python -m plaudit_workers.training``."""

from __future__ import annotations

from plaudit_workers import process
from plaudit_workers.training.worker import serve

if __name__ == "__main__":
    raise SystemExit(process.main(serve))
