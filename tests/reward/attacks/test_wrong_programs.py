"""Wrong programs that try to score: each is scored exactly 0, neither passed nor left without a value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from plaudit_job.rules.arguments import CodeOptions
from plaudit_reward.code.scorer import CodeScorer
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.records import Sample

ScoreProgram = Callable[..., Score]

PRINTS = {"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]}
RETURNS = {"fn_name": "f", "inputs": ["[1, 2]\n3", "[4]\n5"], "outputs": ["[6, 1]", "[9, 1]"]}
ASSERTS = {"assert_case": ["assert f(3) == 9", "x = 4\nassert f(x) == 16, 'square'", "assert abs(f(5) - 25) < 1e-6"]}

ENDS = {
    "nothing": "",
    "a text that is not closed": "'''",
    "no program": "for for",
    "exit 0 at once": "import os\nos._exit(0)",
    "an exit with the code of an exception": "import os\nos._exit(1)",
    "an exit that looks like a failed sandbox": "import os\nos._exit(113)",
    "SystemExit": "raise SystemExit",
    "SystemExit 0": "raise SystemExit(0)",
    "sys.exit": "import sys\nsys.exit()",
    "exit of an exit handler": "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError",
    "exit of a thread": "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\nwhile True: pass",
    "exit of a daemon": "import os, threading, time\n"
    "threading.Thread(target=lambda: os._exit(0), daemon=True).start()\ntime.sleep(9)",
    "exit of a timer": "import os, signal, time\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(9)",
    "exit of a finalizer": "import os\nclass E:\n    def __del__(self): os._exit(0)\ne = E()\ndel e",
    "exit of a weak reference": "import os, weakref\nclass E: pass\ne = E()\nweakref.finalize(e, os._exit, 0)\ndel e",
    "exit of the collector": "import gc, os\ngc.callbacks.append(lambda *_: os._exit(0))\ngc.collect()",
    "exit of an audit hook": "import os, sys\nsys.addaudithook(lambda *_: os._exit(0))\nopen(0)",
    "exit of an excepthook": "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\nraise ValueError",
    "exit of a trace function": "import os, sys\nsys.settrace(lambda *_: os._exit(0))\n(lambda: 0)()",
    "exit of a profile function": "import os, sys\nsys.setprofile(lambda *_: os._exit(0))\nlen([])",
    "exit of a message": "import os\nclass E(Exception):\n    def __str__(self): os._exit(0)\nraise E",
    "an exit by a system call": "import sys\nc = __import__('gc')\n"
    "m = [m for m in c.get_objects() if type(m) is type(sys) and m.__name__ == 'ctypes'][0]\n"
    "m.CDLL(None).syscall(231, 0)",
    "unwinding into the caller": "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\n"
    "f.f_globals.clear()\nraise SystemExit",
    "a null pointer": "import gc, sys\n"
    "[m for m in gc.get_objects() if type(m) is type(sys) and m.__name__ == 'ctypes'][0].string_at(0)",
    "an abort": "import os\nos.abort()",
    "an endless generator of errors": "class E(Exception):\n    def __str__(self): raise E\nraise E",
    "deep recursion": "def g(n): return [g(n + 1)]\ng(0)",
    "memory": "x = bytearray(1 << 40)",
    "an error in memory": "raise MemoryError",
    "a keyboard interrupt": "raise KeyboardInterrupt",
    "a generator's exit": "raise GeneratorExit",
    "closing all files": "import os\nos.closerange(0, 99)",
    "another program in its place": "import os\nos.execv('/bin/true', ['true'])",
    "a child in its place": "import os\nif os.fork(): os._exit(0)",
    "a child that ends after it": "import os, time\nif os.fork() == 0:\n    time.sleep(0.2)\n    os._exit(0)\n"
    "os._exit(7)",
    "a session of its own": "import os\nif os.fork(): os._exit(0)\nos.setsid()",
    "other modules": "import sys\nsys.modules.clear()",
    "no builtins": "import builtins\nfor name in list(vars(builtins)): delattr(builtins, name)",
    "output to nowhere": "import os, sys\nsys.stdout = None\nos.dup2(0, 1)",
    "input from its output": "import os\nos.dup2(1, 0)",
    "a recursion limit": "import sys\nsys.setrecursionlimit(30)",
    "another exit": "import os, sys\nos._exit = sys.exit = exit = quit = lambda *_: None\nraise SystemExit(0)",
    "half of a surrogate pair": "'\ud800'",
    "a null character": "x = '\0'",
}
"""By what they try; each is wrong in all three forms."""

SIGNALS = [1, 2, 3, 6, 8, 9, 11, 13, 14, 15, 17, 19, 24, 25, 31, 32, 33, 34, 35, 36, 40, 50, 63, 64]
SIGNALS_TO_ITSELF = {
    **{f"signal {number}": f"import os\nos.kill(os.getpid(), {number})" for number in SIGNALS},
    "raising a real-time signal": "import signal\nsignal.raise_signal(42)",
    "a real-time signal to its thread": "import signal, threading\nsignal.pthread_kill(threading.get_ident(), 44)",
    "killing the parent": "import os\nos.kill(os.getppid(), 9)",
    "a real-time signal to the parent": "import os\nos.kill(os.getppid(), 40)",
    "killing the group": "import os\nos.kill(0, 9)",
    "killing all": "import os\nos.kill(-1, 9)",
}

GET_RESOURCE = (
    "import gc, sys\nr = [m for m in gc.get_objects() if type(m) is type(sys) and m.__name__ == 'resource'][0]\n"
)
SPIN = "while True: pass"
LIMITS = {
    "a CPU limit of 0": f"{GET_RESOURCE}r.setrlimit(r.RLIMIT_CPU, (0, 0))\n{SPIN}",
    "a CPU limit of 1": f"{GET_RESOURCE}r.setrlimit(r.RLIMIT_CPU, (1, 1))\n{SPIN}",
    "a soft CPU limit": f"{GET_RESOURCE}r.setrlimit(r.RLIMIT_CPU, (1, 9))\n{SPIN}",
    "prlimit of itself": f"{GET_RESOURCE}r.prlimit(0, r.RLIMIT_CPU, (1, 1))\n{SPIN}",
    "prlimit by number": f"{GET_RESOURCE}import os\nr.prlimit(os.getpid(), r.RLIMIT_CPU, (1, 1))\n{SPIN}",
    "a memory limit": f"{GET_RESOURCE}r.setrlimit(r.RLIMIT_AS, (1, 1))\nx = [bytearray(1 << 20) for _ in range(99)]",
    "a stack limit": f"{GET_RESOURCE}r.setrlimit(r.RLIMIT_STACK, (4096, 4096))\ndef g(): g()\ng()",
    "CPU of many threads": "import threading\n"
    "for _ in range(9): threading.Thread(target=lambda: exec('while True: pass'), daemon=True).start()\n"
    "while True: pass",
    "sleeping": "import time\ntime.sleep(99)",
    "stopping itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "a flood": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "a flood of errors": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "forks": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "pretending to be confined again": "import os\nos.write(2, b'\\x06')\nos.kill(os.getpid(), 40)",
}

ALWAYS = (
    "class Always:\n    def yes(self, *_): return True\n    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = yes\n"
    "    __bool__ = __contains__ = __instancecheck__ = yes\n    __hash__ = lambda self: 0\n"
    "    def same(self, *_): return self\n    __sub__ = __rsub__ = __abs__ = __add__ = __radd__ = __getattr__ = same\n"
    "    __neg__ = __float__ = __round__ = __index__ = __len__ = __iter__ = __next__ = __getitem__ = same\n"
)
VALUES = {
    "zero": "def f(*_): return 0",
    "none": "def f(*_): pass",
    "true": "def f(*_): return True",
    "nan": "def f(*_): return float('nan')",
    "equal to everything": f"{ALWAYS}def f(*_): return Always()",
    "a class equal to everything": "class M(type):\n    def __eq__(self, other): return True\n"
    "    __hash__ = type.__hash__\nclass A(metaclass=M): pass\ndef f(*_): return A",
    **{
        f"a kind of {base} equal to everything": f"class A({base}):\n    def __eq__(self, other): return True\n"
        "    def __lt__(self, other): return True\n    def __sub__(self, other): return A()\n"
        "    def __abs__(self): return A()\n    __hash__ = None\ndef f(*_): return A()"
        for base in ("int", "float", "str", "list", "tuple", "dict", "set")
    },
    "a list of what equals everything": f"{ALWAYS}def f(*_): return [Always(), Always()]",
    "numpy that equals everything": "import numpy\nclass A(numpy.ndarray):\n    def __eq__(self, other): return True\n"
    "def f(*_): return numpy.zeros(1).view(A)",
    "a mock": "from unittest.mock import MagicMock, ANY\ndef f(*_): return ANY",
    "a mock of a mock": "from unittest.mock import MagicMock\nf = MagicMock()",
    "raises": "def f(*_): raise ValueError",
    "raises half of a surrogate pair": "def f(*_): raise ValueError('\\udc80')",
    "returns half of a surrogate pair": "def f(*_): return '\\udc80'",
    "raises an assertion": "def f(*_): raise AssertionError",
    "exits": "def f(*_): raise SystemExit(0)",
    "leaves": "import os\ndef f(*_): os._exit(0)",
    "dies of a real-time signal": "import os\ndef f(*_): os.kill(os.getpid(), 40)",
    "is missing": "def g(*_): pass",
    "is a number": "f = 9",
    "is deleted": "def f(*_): return 0\ndel f",
    "is a generator": "def f(*_): yield 9",
    "is endless": "def f(*_):\n    while True: yield 9",
    "is a coroutine": "async def f(*_): return 9",
    "contains itself": "x = []\nx.append(x)\ndef f(*_): return x",
    "is deep": "def f(*_):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "is a huge number": "def f(*_): return 10 ** 20000",
    "has keys with equal hashes": "def f(*_): return {k * (2 ** 61 - 1): 0 for k in range(2000)}",
    "exits in a decorator": "import sys\ndef d(g):\n    sys.exit(0)\n@d\ndef f(*_): return 0",
    "asserts turned off": "__debug__ = False\ndef f(*_): return 0",
    "another AssertionError": "import builtins\nclass AssertionError(Exception): pass\n"
    "builtins.AssertionError = AssertionError\ndef f(*_): return 0",
    "another comparison": "import builtins, operator\noperator.eq = lambda a, b: True\nbuiltins.abs = lambda x: 0\n"
    "abs = lambda x: 0\nbuiltins.len = lambda x: 0\ndef f(*_): return 0",
    "another compiler": "import builtins\nbuiltins.compile = builtins.exec = builtins.eval = lambda *a, **k: True\n"
    "def f(*_): return 0",
    "another json": 'import json\njson.dumps = lambda *a, **k: \'{"answers": [], "printed": ""}\'\ndef f(*_): return 0',
    "another plaudit": "import sys\nfor name, m in list(sys.modules.items()):\n    if 'plaudit' in name:\n"
    "        for key, v in list(vars(m).items()):\n            if callable(v): setattr(m, key, lambda *a, **k: True)\n"
    "def f(*_): return 0",
    "the caller's variables": "import sys\ndef f(*_):\n    frame = sys._getframe()\n    while frame:\n"
    "        for v in frame.f_locals.values():\n"
    "            if isinstance(v, dict) and 'expected' in v: return v['expected']\n"
    "        frame = frame.f_back\n    return 0",
    "a search of memory": "import gc\ndef f(*args):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, str) and 'assert ' in o and '9' in o: return 9\n    return 0",
    "infinite": "def f(*_): return float('inf')",
    "a decimal that is no number": "from decimal import Decimal\ndef f(*_): return Decimal('NaN')",
    "an empty array": "import numpy\ndef f(*_): return numpy.array([])",
    "all answers": "def f(*_): return range(100)",
    "an array of all answers": "import numpy\ndef f(*_): return numpy.arange(100.0)",
    "an iterator over all answers": "def f(*_): return iter(range(100))",
    "another value each time": "import itertools\nf = lambda *_, n=itertools.count(): next(n)",
    "not implemented": "def f(*_): return NotImplemented",
    "a type": "def f(*_): return int",
    "an exception": "def f(*_): return AssertionError()",
    "a number with another text": "class A(int):\n    __repr__ = __str__ = lambda self: '9'\ndef f(*_): return A(0)",
    "a float with another text": "class A(float):\n    __repr__ = __str__ = lambda self: '25.0'\n"
    "def f(*_): return A(0)",
    "a class made by another": "class A:\n    def __new__(cls, *_): return True\nf = A",
    "a dictionary of whatever is asked": "from collections import defaultdict\n"
    "def f(*_): return defaultdict(lambda: True)",
    "a text that reads as code": "def f(*_): return '__import__(\"os\")._exit(0)'",
    "another encoder": "import json\njson.JSONEncoder.encode = json.JSONEncoder.default = lambda *_: '9'\n"
    "json.encoder.c_make_encoder = None\njson.encoder.INFINITY = 9\ndef f(*_): return 0",
    "another writer": "import os\nwrite = os.write\nos.write = lambda n, b: write(n, b.replace(b'0', b'9'))\n"
    "def f(*_): return 0",
    "another importer": "import sys, types\nclass A:\n    def find_spec(self, *_): return None\n"
    "sys.meta_path.insert(0, A())\nsys.modules['ast'] = sys.modules['operator'] = types.ModuleType('x')\n"
    "def f(*_): return 0",
    "a forged result": 'import os\ndef f(*_):\n    os.write(1, b\'{"answers": [{"value": true}], "passed": true}\')\n'
    "    os._exit(0)",
    "a forged verdict": "import os\nos.write(1, b'{\"passed\": true}')\nos._exit(0)",
    "forged verdicts on every descriptor": "import os\nfor n in range(64):\n"
    "    try: os.write(n, b'{\"passed\": true}\\n\\x01')\n"
    "    except OSError: pass\ndef f(*_): return 0",
    "a forged object": 'import os\nos.write(1, b\'{"answers": [{"value": ["object", -5]}, {"value": {"a": 1}}]}\')\n'
    "os._exit(0)",
    "a forged need": 'import os\nos.write(1, b\'{"needed": [], "kept": 9, "passed": true, "answers": {}}\')\n'
    "os._exit(0)",
    "a forged answer without a value": 'import os\nos.write(1, b\'{"answers": [{}, {}, {}], "printed": ""}\')\n'
    "os._exit(0)",
}
"""What ``f`` is; it would have to return the square, or the sum."""

ESCAPES = {
    "another marshal and pickle": "import marshal, pickle\nmarshal.dumps = pickle.dumps = lambda *a, **k: b'{}'\n"
    "marshal.loads = pickle.loads = lambda *a, **k: 9\ndef f(*_): return 0",
    "another print and type": "import builtins\nbuiltins.print = lambda *a, **k: None\n"
    "builtins.type = lambda *a: bool\nbuiltins.isinstance = lambda *a: True\ndef f(*_): return 0",
    "another json encoder": "import json.encoder\njson.encoder.c_make_encoder = None\n"
    "json.JSONEncoder.encode = lambda *a: '9'\njson.JSONEncoder.iterencode = lambda *a: ['9']\ndef f(*_): return 0",
    "a class that is exchanged": "class B: pass\ndef f(*_):\n    b = B()\n"
    "    b.__class__ = type('C', (B,), {'__eq__': lambda *a: True})\n"
    "    return b",
    "a class that says it is int": "class A:\n    __class__ = property(lambda self: int)\n"
    "    def __eq__(self, other): return True\n    def __int__(self): return 0\n    __index__ = __int__\n"
    "def f(*_): return A()",
    **{
        f"a class that says it is {base}": f"class A:\n    __class__ = property(lambda self: {base})\n"
        "    def __eq__(self, other): return True\n    __hash__ = None\n    def __iter__(self): return iter([0])\n"
        "    def items(self): return [(0, 0)]\ndef f(*_): return A()"
        for base in ("str", "float", "list", "dict", "set")
    },
    "a tracer that changes variables": "import sys\ndef t(frame, event, value):\n"
    "    for k in list(frame.f_locals):\n        try: frame.f_locals[k] = True\n        except Exception: pass\n"
    "    return t\nsys.settrace(t)\nimport threading\nthreading.settrace(t)\ndef f(*_): return 0",
    "a profiler that changes its callers": "import sys\ndef p(frame, event, value):\n    while frame:\n"
    "        frame.f_globals['passed'] = frame.f_globals['check'] = True\n        frame = frame.f_back\n"
    "sys.setprofile(p)\ndef f(*_): return 0",
    "a monitor of returns": "import sys\nm = sys.monitoring\nm.use_tool_id(3, 'x')\n"
    "m.register_callback(3, m.events.PY_RETURN, lambda *a: True)\nm.set_events(3, m.events.PY_RETURN)\n"
    "def f(*_): return 0",
    "a collector that rewrites lists": "import gc\ndef c(*_):\n    for o in gc.get_objects():\n"
    "        if type(o) is dict and 'expected' in o: o['expected'] = 0\ngc.callbacks.append(c)\n"
    "def f(*_):\n    gc.collect()\n    return 0",
    "referrers of its arguments": "import gc\ndef f(*args):\n    for r in gc.get_referrers(*args):\n"
    "        for q in gc.get_referrers(r):\n            if isinstance(q, dict): q['expected'] = q['value'] = 0\n"
    "    return 0",
    "a small number changed in memory": "import ctypes\ndef f(*_):\n"
    "    ctypes.memmove(id(9) + 24, (0).to_bytes(4, 'little'), 4)\n    return 0",
    "a type changed in memory": "import ctypes\ndef f(*_):\n    x = 0\n"
    "    ctypes.c_void_p.from_address(id(x) + 8).value = id(bool)\n    return x",
    "its memory as a file": "def f(*_):\n    try:\n        with open('/proc/self/mem', 'r+b', 0) as m:\n"
    "            m.seek(id(9) + 24)\n            m.write(b'\\0')\n    except OSError: pass\n    return 0",
    "its parent's memory as a file": "import os\ndef f(*_):\n    try:\n"
    "        with open(f'/proc/{os.getppid()}/mem', 'r+b', 0) as m: m.read(1)\n    except OSError: return 0\n"
    "    return 9",
    "arguments of other processes": "import os\ndef f(*_):\n    try: seen = os.listdir('/proc')\n"
    "    except OSError: return 0\n    return 9 if any(n.isdigit() for n in seen) else 0",
    "reading every descriptor": "import os, re\ndef f(*_):\n    for n in range(3, 64):\n"
    "        try:\n            os.set_blocking(n, False)\n            if re.search(b'9', os.read(n, 65536)): return 9\n"
    "        except OSError: pass\n    return 0",
    "another output": "import os\nfor n in range(3, 64):\n    try: os.dup2(n, 1)\n    except OSError: pass\n"
    "def f(*_): return 0",
    "a thread that prints verdicts": "import os, threading\ndef g():\n    while True:\n"
    '        for n in range(3, 16):\n            try: os.write(n, b\'{"answers": [{"value": 9}]}\\n\')\n'
    "            except OSError: pass\nthreading.Thread(target=g, daemon=True).start()\ndef f(*_): return 0",
    "a child that outlives it": "import os\ntry:\n    if os.fork() == 0:\n"
    '        os.write(1, b\'{"answers": [{"value": 9}], "printed": ""}\')\n        os._exit(0)\nexcept OSError: pass\n'
    "def f(*_): return 0",
    "an exit after the first call": "import os\nn = []\ndef f(*_):\n    n.append(1)\n    if len(n) > 1: os._exit(0)\n"
    "    return 0",
    "a view of memory": "def f(*_): return memoryview(b'9')",
    "a generator that never ends its call": "def g():\n    while True:\n        try: yield 9\n"
    "        except GeneratorExit: pass\nit = g()\nnext(it)\ndef f(*_): return it",
    "a generator's frame": "import sys\ndef g():\n    frame = sys._getframe()\n    while frame.f_back:\n"
    "        frame = frame.f_back\n        frame.f_globals.update(len=lambda *a: 0, all=lambda *a: True)\n    yield 0\n"
    "def f(*_): return next(g())",
    "the traceback's frames": "def f(*_):\n    try: raise ValueError\n    except ValueError as e:\n"
    "        frame = e.__traceback__.tb_frame\n        while frame:\n"
    "            for v in list(frame.f_locals.values()):\n"
    "                if isinstance(v, (list, dict)): v.clear()\n            frame = frame.f_back\n    return 0",
    "another code object": "def g(*_): return True\nimport sys\nframe = sys._getframe()\nwhile frame:\n"
    "    for v in list(frame.f_globals.values()):\n        try: v.__code__ = g.__code__\n"
    "        except (AttributeError, TypeError, ValueError): pass\n    frame = frame.f_back\ndef f(*_): return 0",
    "an import hook": "import sys\nclass H:\n    def find_spec(self, *a): raise SystemExit(0)\n"
    "sys.meta_path.insert(0, H())\nsys.modules.pop('json', None)\ndef f(*_): return 0",
    "modules that are removed": "import sys\nsys.modules.clear()\ndef f(*_): return 0",
    "an integer limit": "import sys\nsys.set_int_max_str_digits(0)\ndef f(*_): return 10 ** 100000",
    "a switch of threads": "import sys, threading\nsys.setswitchinterval(1e-9)\nx = [0]\ndef g():\n"
    "    while True: x[0] ^= 9\nthreading.Thread(target=g, daemon=True).start()\ndef f(*_): return x",
    "a list that changes while it is read": "class L(list):\n    def __iter__(self): return iter([9])\n"
    "    def __len__(self): return 1\n    def __getitem__(self, i): return 9\ndef f(*_): return L([0])",
    "bytes of an answer": "def f(*_): return b'9'",
    "an answer with another type": "def f(*_): return '9'",
}
"""What reaches around the call: into the interpreter, the memory, the caller, the files."""

OUTPUTS = {
    "nothing": "pass",
    "another number": "print(5)",
    "the input": "print(input())",
    "both answers": "print(2)\nprint(4)",
    "almost": "print(2.1)",
    "not a number": "print('nan')",
    "a million blank lines": "print('\\n' * 1000000)",
    "a long number": "print('1' * 1000000)",
    "a million numbers": "print('1\\n' * 1000000)",
    "no Unicode": "import os\nos.write(1, b'\\xff\\xfe')",
    "right, then an error": "x = int(input()) + 1\nprint(x)\nraise ValueError",
    "right, then a signal": "import os\nx = int(input()) + 1\nprint(x, flush=True)\nos.kill(os.getpid(), 40)",
    "right, then silence": "import time\nx = int(input()) + 1\nprint(x, flush=True)\ntime.sleep(99)",
}

MODES = {"as verl": {}, "as script": {"asScript": True}, "all or nothing": {"continuous": False, "asScript": True}}
FORMS = {"program": PRINTS, "function": RETURNS, "assert": ASSERTS}


@pytest.fixture(scope="module")
def score() -> Iterator[ScoreProgram]:
    """Score a program; all share one fork server for each set of options."""
    scorers: dict[str, CodeScorer] = {}

    async def run(program: str, ground_truth: Any, limit_s: float = 60.0, **options: Any) -> Score:
        arguments = {"timeSeconds": 0.4, "memory": "128Mi", "output": "1Mi", "cases": 1, **options}
        if str(arguments) not in scorers:
            scorer = CodeScorer("code", CodeOptions.read(arguments), processes=1)
            await scorer.open()
            scorers[str(arguments)] = scorer
        sample = Sample("t-0-1.0", 0, "apps", "", f"```python\n{program}\n```", ground_truth=ground_truth)
        return await scorers[str(arguments)].score(sample, Attempt(limit_s))

    async def close() -> None:
        await asyncio.gather(*(scorer.close() for scorer in scorers.values()))

    with asyncio.Runner() as runner:
        yield lambda *args, **kwargs: runner.run(run(*args, **kwargs))
        runner.run(close())


def assert_zero(score: Score) -> None:
    assert (score.outcome, score.value) == ("scored", 0.0), score
    assert msgspec.msgpack.encode(score)  # whatever the program raised, the score can travel


@pytest.mark.alike
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ENDS)
def test_a_program_that_ends_itself_scores_0(score: ScoreProgram, name: str, form: str) -> None:
    for mode in ("as verl", "as script"):
        wrong = ENDS[name] if form == "program" else f"def f(*_): return 0\n{ENDS[name]}"
        assert_zero(score(wrong, FORMS[form], **MODES[mode]))


@pytest.mark.parametrize("name", SIGNALS_TO_ITSELF)
def test_a_program_that_sends_signals_scores_0(score: ScoreProgram, name: str) -> None:
    for form, ground_truth in FORMS.items():
        wrong = SIGNALS_TO_ITSELF[name] if form == "program" else f"def f(*_): return 0\n{SIGNALS_TO_ITSELF[name]}"
        assert_zero(score(wrong, ground_truth))


@pytest.mark.alike
@pytest.mark.parametrize("name", LIMITS)
def test_a_program_at_its_limits_scores_0(score: ScoreProgram, name: str) -> None:
    assert_zero(score(LIMITS[name], PRINTS, asScript=True))
    assert_zero(score(f"def f(*_):\n    exec({LIMITS[name]!r}, {{}})", ASSERTS))


@pytest.mark.alike
@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_is_wrong_scores_0(score: ScoreProgram, name: str) -> None:
    assert_zero(score(VALUES[name], RETURNS))
    literal, _, computed = ASSERTS["assert_case"]
    assert_zero(score(VALUES[name], {"assert_case": [literal]}))
    assert_zero(score(VALUES[name], {"assert_case": [computed]}))


@pytest.mark.alike
@pytest.mark.parametrize("name", ESCAPES)
def test_a_program_that_reaches_around_its_call_scores_0(score: ScoreProgram, name: str) -> None:
    for form, ground_truth in FORMS.items():
        assert_zero(score(ESCAPES[name], ground_truth, **({"asScript": True} if form == "program" else {})))


@pytest.mark.alike
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OUTPUTS)
def test_output_that_is_wrong_scores_0(score: ScoreProgram, name: str, mode: str) -> None:
    assert_zero(score(OUTPUTS[name], PRINTS, **MODES[mode]))


def test_sleeping_through_many_cases_scores_0_and_not_a_timeout_of_the_sample(score: ScoreProgram) -> None:
    many = {"inputs": ["1"] * 200, "outputs": ["2"] * 200}
    slow = score("import time\ntime.sleep(0.2)", many, limit_s=0.7, cases=0)
    assert_zero(slow)
    assert "for all test cases of the sample" not in str(slow.extra["failure"])  # the first case has its own reason


def test_cases_done_before_the_samples_time_is_up_count(score: ScoreProgram) -> None:
    cases = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    program = "import time\nn = input()\nif n == '3':\n    time.sleep(99)\nprint(n)"
    assert score(program, cases, limit_s=1.5, cases=0, timeSeconds=5).value == pytest.approx(2 / 3)


@pytest.mark.parametrize("mode", MODES)
def test_right_programs_score_1_after_all_that(score: ScoreProgram, mode: str) -> None:
    function = "class Solution:\n    def f(self, numbers, n): return [sum(numbers) + n, 1]"
    options = {**MODES[mode], "cases": 0, "timeSeconds": 10}
    assert score("print(int(input()) + 1)", PRINTS, **options).value == 1.0
    assert score(function, RETURNS, **options).value == 1.0
    assert score("def f(x): return x * x", ASSERTS, **options).value == 1.0
