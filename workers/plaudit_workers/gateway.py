"""``python -m plaudit_workers.gateway``: one gateway of a reward service."""

from plaudit_workers import process
from plaudit_workers.service.gateway import serve

if __name__ == "__main__":
    raise SystemExit(process.main(serve))
