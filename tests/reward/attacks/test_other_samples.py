"""One sample's program looks for another's in its memory, and around it."""

from __future__ import annotations

import hashlib

from plaudit_sandbox.sandbox import ProgramLimits, RunProgram, Sandbox

ANSWER = hashlib.sha256(b"the answer of a hard problem").hexdigest()
PRINTS_IT = "import hashlib\nprint(('ANS:' + hashlib.sha256(b'the answer of a hard problem').hexdigest()) * 40)"
LOOKS_FOR_IT = r"""
import ctypes, os, re, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
reader, writer = os.pipe()

def page(address):
    # A system call answers "bad address" where reading would end the process.
    return os.read(reader, 4096) if libc.write(writer, ctypes.c_void_p(address), ctypes.c_size_t(4096)) > 0 else b""

mark = re.compile(bytes([65, 78, 83]) + bytes([58]) + rb"([0-9a-f]{64})")
regions = {id(o) >> 20 for o in [object() for _ in range(20000)] + [bytes(n) for n in range(1, 500)]}
for module in list(sys.modules.values()):
    regions |= {id(value) >> 20 for value in list(vars(module).values())[:200]}
top = libc.sbrk(0) >> 20
regions |= set(range(top - 12, top + 1))
found, until = set(), time.time() + 4
for region in sorted(regions, reverse=True):
    for address in range(region << 20, (region + 1) << 20, 4096):
        found.update(mark.findall(page(address)))
    if time.time() > until:
        break
print("scanned", len(regions) > 20, "found", sorted(found))
"""


async def test_a_program_finds_no_trace_of_the_one_before_it() -> None:
    sandbox = Sandbox(1)
    await sandbox.open()
    try:
        for source in (PRINTS_IT, f"{PRINTS_IT}\nraise ValueError('ANS:{ANSWER}')", f"x = 'ANS:{ANSWER}'\n{PRINTS_IT}"):
            await sandbox.run(RunProgram(source, f"ANS:{ANSWER}", as_script=True))
        looked = await sandbox.run(RunProgram(LOOKS_FOR_IT, as_script=True, limits=ProgramLimits(time_s=20)))
    finally:
        await sandbox.close()
    assert (looked.reason, looked.stdout) == ("", b"scanned True found []\n")
