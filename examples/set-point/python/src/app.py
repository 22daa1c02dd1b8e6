"""A set point, a key under `temp/`, is a number from -40 to 125. The rule refuses other values, and
says how many of this client it refused. The same rule stands in ../rust and ../js, and all three
answer with the same bytes.

A rule must not keep state between two requests: the store re-executes redelivered requests, and the
answer must have the same bytes. So the count is in a hidden key per client. It expires when the
client had no refusal for a day, so disconnected clients leave nothing behind.
"""

import re

from componentize_py_types import Err
from wit_world import exports
from wit_world.exports.admission import Identity
from wit_world.imports import log, table
from wit_world.imports.types import Access, Bytes_Owned, Fault_Denied, Fault_Other, Fault_Quota

LOWEST = -40
HIGHEST = 125
DAY_MS = 86_400_000

# Byte by byte, so that it is the same in every language: -12, 21.5, but not 2e1 or +3.
NUMBER = re.compile(rb"-?[0-9]{1,6}(\.[0-9]{1,6})?")


def admit(command):
    if command.name != "SET" or not command.key.startswith(b"temp/"):
        return
    if not NUMBER.fullmatch(command.value) or not LOWEST <= float(command.value) <= HIGHEST:
        refused = count(command.client, command.now)
        text = f"a set point is a number from {LOWEST} to {HIGHEST} (refusal {refused})"
        raise Err(Fault_Other(text))


def count(client, now):
    """Counts a refusal of the client. Returns how many there are."""
    key = Bytes_Owned(f"set-point/refusals/{client or ''}".encode())
    entry = table.head(key, Access.HIDDEN)
    before = int(table.load(key, 0, entry.len)) if entry else 0
    table.put(key, Bytes_Owned(b"%d" % (before + 1)), None, None, now + DAY_MS)
    return before + 1


class Admission(exports.Admission):
    def describe(self):
        return Identity("set-point-python", "1.0.0")

    def admit(self, command):
        try:
            if admit(command) is not None:
                raise TypeError("admit returns a value: it refuses by raising, and is not async")
        except BaseException as bug:  # also SystemExit
            match bug:
                case Err(value=Fault_Denied() | Fault_Quota() | Fault_Other(value=str())):
                    raise  # a refusal
            at = bug.__traceback__
            while at.tb_next:
                at = at.tb_next
            # The host names this line as the cause of the failure. The module `traceback` would read
            # files, and a policy has none.
            file = at.tb_frame.f_code.co_filename.rsplit("/", 1)[-1]
            log.write(log.Level.ERROR, f"{file}:{at.tb_lineno}: {type(bug).__name__}: {bug}")
            raise
