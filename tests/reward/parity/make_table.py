"""Writes ``verl.json``: what verl's published scorers give for every case of ``cases.py``.

verl is not a dependency of Plaudit; run this in an environment of its own::

    uv venv --python 3.11 verl
    VIRTUAL_ENV=verl uv pip install --no-deps verl==0.9.1 mathruler==0.1.0
    VIRTUAL_ENV=verl uv pip install math-verify==0.9.0 sympy==1.14.0 mpmath==1.3.0 pylatexenc==2.11 numpy tqdm
    verl/bin/python tests/reward/parity/make_table.py

verl's own ``__init__`` files, and one that its scorers import, need torch, Ray and transformers, which the scorers
themselves do not use: empty packages stand in for those. The scorers are verl's, as published.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cases import CASES, Case

TABLE = Path(__file__).with_name("verl.json")
PACKAGES = ("verl", "mathruler", "math-verify", "sympy", "pylatexenc", "latex2sympy2-extended")


def main() -> None:
    """Runs all cases, one after the other."""
    rows = [row(case) for case in CASES]
    versions = {name: version(name) for name in PACKAGES}
    lines = ",\n".join("  " + json.dumps(line, ensure_ascii=True) for line in rows)
    TABLE.write_text(f'{{"versions": {json.dumps(versions)},\n "rows": [\n{lines}\n]}}\n')
    print(f"{TABLE.name}: {len(rows)} rows")


def stand_in(*packages: str) -> None:
    """Empty packages in place of those, so that their modules can be imported."""
    root = Path(next(iter(importlib.util.find_spec("verl").submodule_search_locations))).parent
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package


def row(case: Case) -> dict[str, Any]:
    """The case's input and verl's result: ``score`` and what came with it, or the name of what it raised."""
    inputs = {"data_source": case.data_source, "response": case.response, "ground_truth": case.ground_truth}
    if case.verl is not None:
        inputs["function"] = [case.verl[0], case.verl[1]]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = called(case)
    except ImportError:
        raise  # of this environment
    except Exception as error:  # whatever verl raises is its result
        return {**inputs, "verl": {"raised": type(error).__name__}}
    return {**inputs, "verl": result if isinstance(result, dict) else {"score": float(result)}}


def called(case: Case) -> Any:
    """What verl's function returns."""
    if case.verl is None:
        scorers = importlib.import_module("verl.utils.reward_score")
        return scorers.default_compute_score(case.data_source, case.response, case.ground_truth)
    module, function = case.verl[0].split(".")
    scorer = importlib.import_module(f"verl.utils.reward_score.{module}")
    return getattr(scorer, function)(case.response, case.ground_truth, **case.verl[1])


# At import, so that it is done in the processes too that verl's Math-Verify scorer starts.
stand_in("verl", "verl.utils")
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].Tensor = object

if __name__ == "__main__":
    main()
