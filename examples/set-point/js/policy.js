// A set point is a number within bounds. SET of any other value is refused. The same rule stands in
// ../rust and ../python, and all three answer with the same bytes.
//
// A policy must not keep state between two requests: the store re-executes redelivered requests,
// and the answer must have the same bytes.

import log from "statehouse:policy/log@1.0.0";
import table from "statehouse:policy/table@1.0.0";
import watch from "statehouse:policy/watch@1.0.0";

const LOWEST = 5;
const HIGHEST = 30;

// The format of a number, byte by byte, so that it is the same in every language: -12, 21.5, but
// not 2e1 or +3.
const NUMBER = /^-?[0-9]{1,6}(\.[0-9]{1,6})?$/;

// The notification topic has the key and the client id in hex, which must fit into an MQTT topic.
const KEY_BYTES_MAX = 1000;

// More words than any command has. The limit keeps the interpreter from parsing millions of words.
const WORDS_MAX = 8;

const COMMANDS = ["SET", "GET", "DEL", "KEYNOTIFY"];

/**
 * An `-ERR` answer. If the request is malformed (`free`), the store may execute a duplicate again.
 * Otherwise (`same`), a duplicate must get the same answer.
 */
class Refusal {
  constructor(text, repeat) {
    this.text = text;
    this.repeat = repeat;
  }
}

const malformed = (text) => new Refusal(text, "free");
const forbidden = (text) => new Refusal(text, "same");

export const handler = {
  describe() {
    return { name: "set-point-js", version: "1.0.0", commands: COMMANDS };
  },

  configure(options) {
    if (options.length > 0) throw "this policy has no options";
  },

  route(payload) {
    try {
      return parse(payload)[1] ?? null;
    } catch {
      return null;
    }
  },

  handle({ payload }) {
    let command = null;
    try {
      const spans = parse(payload);
      const index = COMMANDS.indexOf(text(payload, spans[0]).toUpperCase());
      if (index < 0) throw malformed("unknown command");
      command = index;
      return { ...run(COMMANDS[index], payload, spans), command };
    } catch (error) {
      const refusal = error instanceof Refusal ? error : forbidden(refusalText(error));
      return { ...answer(`-ERR ${refusal.text}\r\n`), repeat: refusal.repeat, command };
    }
  },

  notify(change, dialect) {
    const deleted = dialect === "sdk" ? "$6\r\nDELETE\r\n" : "$3\r\nDEL\r\n";
    return {
      topicPrefix: "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/",
      topicSuffix: `/command/notify/${hex(change.key)}`,
      payload:
        change.event === "set"
          ? {
              head: bytes(`*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$${change.len}\r\n`),
              // In `notify`, a span refers to the key.
              body: { tag: "stored", val: reference({ at: 0, len: change.key.length }) },
            }
          : { head: bytes(`*2\r\n$6\r\nNOTIFY\r\n${deleted}`), body: { tag: "none" } },
    };
  },
};

function run(verb, payload, spans) {
  const fits =
    verb === "SET" ? spans.length === 3
    : verb === "KEYNOTIFY" ? spans.length === 2 || spans.length === 3
    : spans.length === 2;
  if (!fits) throw malformed("wrong number of arguments");
  if (spans[1].len === 0 || spans[1].len > KEY_BYTES_MAX) throw malformed("a key has 1 to 1000 bytes");
  const key = reference(spans[1]);
  switch (verb) {
    case "SET": {
      const entry = table.head(key, "write");
      if (entry?.fence) throw forbidden("a fenced key is not for this policy");
      const value = text(payload, spans[2]);
      if (!NUMBER.test(value) || Number(value) < LOWEST || Number(value) > HIGHEST) {
        throw forbidden(`a set point is a number from ${LOWEST} to ${HIGHEST}`);
      }
      return answer("+OK\r\n", table.put(key, reference(spans[2]), null, null, null));
    }
    case "GET": {
      const entry = table.head(key, "read");
      const found = entry
        ? answer(`$${entry.len}\r\n`, entry.version, { tag: "stored", val: key })
        : answer("$-1\r\n");
      return { ...found, repeat: "free" };
    }
    case "DEL": {
      const entry = table.head(key, "write");
      if (entry?.fence) throw forbidden("a fenced key is not for this policy");
      if (!entry) return answer(":0\r\n");
      table.delete(key);
      return answer(":1\r\n", entry.version);
    }
    case "KEYNOTIFY": {
      if (spans.length === 2) {
        watch.add(key);
        return { ...answer("+OK\r\n"), repeat: "free" };
      }
      if (text(payload, spans[2]).toUpperCase() !== "STOP") throw malformed("syntax error");
      return answer(watch.remove(key) ? "+OK\r\n" : ":0\r\n");
    }
  }
}

function answer(head, version = null, body = { tag: "none" }) {
  return { reply: { head: bytes(head), body }, version, repeat: "same", command: null };
}

/** Refers to bytes of the request without copying them. */
function reference(span) {
  return { tag: "span", val: span };
}

/**
 * The error text for a refusal by the host. Any other error is a bug: the host rolls back all
 * changes and answers.
 */
function refusalText(error) {
  const fault = error?.payload;
  switch (fault?.tag) {
    case "denied":
      return "not authorized";
    case "quota":
      return "the quota has been exceeded";
    case "other":
      return fault.val;
    default:
      reportBug(error);
      throw error;
  }
}

/** Logs what a bug is and where. The host names this line as the cause of the failure. */
function reportBug(error) {
  const place = /[\w.-]+\.js:\d+/.exec(error?.stack)?.[0] ?? "policy.js";
  log.write("error", `${place}: ${error?.message ?? error}`);
}

/** The spans of the bulk strings in `*N\r\n` and N times `$LENGTH\r\nBYTES\r\n`. */
function parse(payload) {
  let at = 0;
  const expect = (byte) => {
    if (payload[at++] !== byte) throw malformed("syntax error");
  };
  const line = (kind) => {
    expect(kind);
    const from = at;
    let number = 0;
    while (payload[at] >= 0x30 && payload[at] <= 0x39) number = number * 10 + payload[at++] - 0x30;
    // No digit, or a leading zero.
    if (at === from || (at > from + 1 && payload[from] === 0x30)) throw malformed("syntax error");
    expect(13);
    expect(10);
    return number;
  };
  const count = line(0x2a);
  if (count < 1 || count > WORDS_MAX) throw malformed("syntax error");
  const spans = [];
  for (let index = 0; index < count; index++) {
    const len = line(0x24);
    spans.push({ at, len });
    at += len;
    expect(13);
    expect(10);
  }
  if (at !== payload.length) throw malformed("syntax error");
  return spans;
}

/** The first bytes of an argument as characters: enough for any verb, option and set point. */
function text(payload, { at, len }) {
  return String.fromCharCode(...payload.subarray(at, at + Math.min(len, 64)));
}

function bytes(text) {
  return Uint8Array.from(text, (character) => character.charCodeAt(0));
}

function hex(key) {
  return Array.from(key, (byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join("");
}
