"""A set point is a number within bounds. SET of any other value is refused. The same rule stands in
../rust and ../js, and all three answer with the same bytes.

A policy must not keep state between two requests: the store re-executes redelivered requests, and
the answer must have the same bytes.
"""

import re

from componentize_py_types import Err
from wit_world import exports
from wit_world.imports import log, table, watch
from wit_world.imports.types import (
    Access,
    Body_None_,
    Body_Stored,
    Bytes_Span,
    Dialect,
    Event,
    Fault_Denied,
    Fault_Quota,
    Frame,
    Info,
    Notification,
    Outcome,
    Repeat,
    Span,
)

LOWEST = 5
HIGHEST = 30

# The format of a number, byte by byte, so that it is the same in every language: -12, 21.5, but not
# 2e1 or +3.
NUMBER = re.compile(rb"-?[0-9]{1,6}(\.[0-9]{1,6})?")

# The notification topic has the key and the client id in hex, which must fit into an MQTT topic.
KEY_BYTES_MAX = 1000

# More words than any command has. The limit keeps the interpreter from parsing millions of words.
WORDS_MAX = 8

COMMANDS = ["SET", "GET", "DEL", "KEYNOTIFY"]

COUNT = re.compile(rb"\*([1-9][0-9]*)\r\n")
LENGTH = re.compile(rb"\$(0|[1-9][0-9]*)\r\n")


class Refusal(Exception):
    """An `-ERR` answer. If the request is malformed (`FREE`), the store may execute a duplicate
    again. Otherwise (`SAME`), a duplicate must get the same answer.
    """

    def __init__(self, text, repeat=Repeat.SAME):
        self.text = text
        self.repeat = repeat


class Handler(exports.Handler):
    def describe(self):
        return Info("set-point-python", "1.0.0", COMMANDS)

    def configure(self, options):
        if options:
            raise Err("this policy has no options")

    def route(self, payload):
        try:
            spans = parse(payload)
        except Refusal:
            return None
        return spans[1] if len(spans) > 1 else None

    def handle(self, request):
        command = None
        try:
            spans = parse(request.payload)
            verb = text(request.payload, spans[0]).upper().decode("latin-1")
            if verb not in COMMANDS:
                raise malformed("unknown command")
            command = COMMANDS.index(verb)
            outcome = run(verb, request.payload, spans)
        except Refusal as refusal:
            outcome = answer(b"-ERR %s\r\n" % refusal.text.encode(), repeat=refusal.repeat)
        except Err as error:
            # A refusal by the host.
            outcome = answer(b"-ERR %s\r\n" % refusal_text(error.value).encode())
        except Exception as bug:
            # The host rolls back all changes and answers.
            report_bug(bug)
            raise
        outcome.command = command
        return outcome

    def notify(self, change, dialect):
        if change.event == Event.SET:
            head = b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$%d\r\n" % change.len
            # In `notify`, a span refers to the key.
            payload = Frame(head, Body_Stored(Bytes_Span(Span(0, len(change.key)))))
        else:
            word = b"$6\r\nDELETE\r\n" if dialect == Dialect.SDK else b"$3\r\nDEL\r\n"
            payload = Frame(b"*2\r\n$6\r\nNOTIFY\r\n" + word, Body_None_())
        return Notification(
            "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/",
            "/command/notify/" + change.key.hex().upper(),
            payload,
        )


def report_bug(bug):
    """Logs what a bug is and where. The host names this line as the cause of the failure."""
    at = bug.__traceback__
    while at.tb_next:
        at = at.tb_next
    # The module `traceback` would read files, and a policy has none.
    file = at.tb_frame.f_code.co_filename.rsplit("/", 1)[-1]
    log.write(log.Level.ERROR, f"{file}:{at.tb_lineno}: {type(bug).__name__}: {bug}")


def run(verb, payload, spans):
    if verb == "SET":
        fits = len(spans) == 3
    elif verb == "KEYNOTIFY":
        fits = len(spans) in (2, 3)
    else:
        fits = len(spans) == 2
    if not fits:
        raise malformed("wrong number of arguments")
    if not 1 <= spans[1].len <= KEY_BYTES_MAX:
        raise malformed("a key has 1 to 1000 bytes")
    key = Bytes_Span(spans[1])

    if verb == "SET":
        entry = table.head(key, Access.WRITE)
        if entry and entry.fence:
            raise Refusal("a fenced key is not for this policy")
        value = text(payload, spans[2])
        if not NUMBER.fullmatch(value) or not LOWEST <= float(value) <= HIGHEST:
            raise Refusal(f"a set point is a number from {LOWEST} to {HIGHEST}")
        version = table.put(key, Bytes_Span(spans[2]), None, None, None)
        return answer(b"+OK\r\n", version)

    if verb == "GET":
        entry = table.head(key, Access.READ)
        if not entry:
            return answer(b"$-1\r\n", repeat=Repeat.FREE)
        return answer(b"$%d\r\n" % entry.len, entry.version, Body_Stored(key), Repeat.FREE)

    if verb == "DEL":
        entry = table.head(key, Access.WRITE)
        if entry and entry.fence:
            raise Refusal("a fenced key is not for this policy")
        if not entry:
            return answer(b":0\r\n")
        table.delete(key)
        return answer(b":1\r\n", entry.version)

    if len(spans) == 2:
        watch.add(key)
        return answer(b"+OK\r\n", repeat=Repeat.FREE)
    if text(payload, spans[2]).upper() != b"STOP":
        raise malformed("syntax error")
    return answer(b"+OK\r\n" if watch.remove(key) else b":0\r\n")


def answer(head, version=None, body=None, repeat=Repeat.SAME):
    return Outcome(Frame(head, body or Body_None_()), version, repeat, None)


def malformed(text):
    return Refusal(text, Repeat.FREE)


def refusal_text(fault):
    if isinstance(fault, Fault_Denied):
        return "not authorized"
    if isinstance(fault, Fault_Quota):
        return "the quota has been exceeded"
    return fault.value


def parse(payload):
    """The spans of the bulk strings in `*N\\r\\n` and N times `$LENGTH\\r\\nBYTES\\r\\n`."""
    line = COUNT.match(payload)
    if not line or number(line) > WORDS_MAX:
        raise malformed("syntax error")
    spans = []
    at = line.end()
    for _ in range(number(line)):
        element = LENGTH.match(payload, at)
        if not element:
            raise malformed("syntax error")
        at = element.end()
        spans.append(Span(at, number(element)))
        at += spans[-1].len
        if payload[at : at + 2] != b"\r\n":
            raise malformed("syntax error")
        at += 2
    if at != len(payload):
        raise malformed("syntax error")
    return spans


def number(line):
    digits = line.group(1)
    # No payload is that long. Without this check, Python would accept the number.
    if len(digits) > 9:
        raise malformed("syntax error")
    return int(digits)


def text(payload, span):
    """The first bytes of an argument: enough for any verb, option and set point."""
    return payload[span.at : span.at + min(span.len, 64)]
