"""Tell whether this kernel lets us make the namespaces of a machine."""

import os
import subprocess

_USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
HAS_NAMESPACES = not subprocess.run(
    ["unshare", *_USER, "--mount", "--pid", "--net", "--fork", "true"], capture_output=True
).returncode
