"""Send published weights from the trainer's memory to rollouts over TCP; no file is written.

``layout`` (one safetensors file, in bytes) ◀ ``part`` (what one rank holds of it) ◀ ``exchange`` (the protocol of one
connection) ◀ ``server`` (in each rank of the trainer), ``blocks`` (of one connection) ◀ ``collector`` (of all ranks) ◀
``receiver`` (in each rollout).
"""
