"""An RLJob: its model, its rules, and what its processes get from it. Imports ``plaudit_wire`` only, and stays light.

``spec``: the sections as pydantic models, from which the reference, the JSON Schema and the CRD follow. ``rules``: the
contradictions between fields. ``fields``: messages and paths of single fields. ``load``: from a file to a job, with
every problem and its line, and back. ``checks``: what a job needs on Kubernetes, and what has no effect. ``data_row``:
the columns of data. ``model_shape``: sizes of models and GPUs. ``secrets``, ``processes``: what processes of a job read
and run. ``problem``: a problem and ``JobError``. ``reference``: ``docs/rljob.md`` and the JSON Schema.
"""
