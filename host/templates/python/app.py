"""Keys under `setpoint/` hold a number from 5 to 30. The standard policy executes every command
that this rule admits.

A rule must not keep state between two requests: the store re-executes redelivered requests, and the
answer must have the same bytes. It may keep state in hidden keys of the table.
"""

import re

from componentize_py_types import Err
from wit_world import exports
from wit_world.exports.admission import Identity
from wit_world.imports import log
from wit_world.imports.types import Fault_Denied, Fault_Other, Fault_Quota

NUMBER = re.compile(rb"-?[0-9]{1,6}(\.[0-9]{1,6})?")


def admit(command):
    if command.name != "SET" or not command.key.startswith(b"setpoint/"):
        return
    if not NUMBER.fullmatch(command.value) or not 5 <= float(command.value) <= 30:
        raise Err(Fault_Other("a set point is a number from 5 to 30"))


class Admission(exports.Admission):
    def describe(self):
        return Identity("{{name}}", "1.0.0")

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
