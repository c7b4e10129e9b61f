"""``python -m plaudit_workers.launch.served_models``: one server of a model that sleeps during updates, in a pod."""

from plaudit_workers import process
from plaudit_workers.launch.served_models.server import serve

if __name__ == "__main__":
    raise SystemExit(process.main(serve))
