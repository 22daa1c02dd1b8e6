// A set point, a key under `temp/`, is a number from -40 to 125. The rule refuses other values, and
// says how many of this client it refused. The same rule stands in ../rust and ../python, and all
// three answer with the same bytes.
//
// A rule must not keep state between two requests: the store re-executes redelivered requests, and
// the answer must have the same bytes. So the count is in a hidden key per client. It expires when
// the client had no refusal for a day, so disconnected clients leave nothing behind.

import log from "statehouse:policy/log@1.0.0";
import table from "statehouse:policy/table@1.0.0";

const LOWEST = -40;
const HIGHEST = 125;
const DAY_MS = 86_400_000;

// Byte by byte, so that it is the same in every language: -12, 21.5, but not 2e1 or +3.
const NUMBER = /^-?[0-9]{1,6}(\.[0-9]{1,6})?$/;

const text = (bytes) => String.fromCharCode(...bytes.subarray(0, 64));
const utf8 = (text) => unescape(encodeURIComponent(text));
const bytes = (text) => Uint8Array.from(utf8(text), (it) => it.charCodeAt(0));
const owned = (text) => ({ tag: "owned", val: bytes(text) });

function admit({ name, key, value, client, now }) {
  if (name !== "SET" || !text(key).startsWith("temp/")) return;
  const number = Number(text(value));
  if (!NUMBER.test(text(value)) || number < LOWEST || number > HIGHEST) {
    const refused = count(client, now);
    const val = `a set point is a number from ${LOWEST} to ${HIGHEST} (refusal ${refused})`;
    throw { tag: "other", val };
  }
}

/** Counts a refusal of the client. Returns how many there are. */
function count(client, now) {
  const key = owned(`set-point/refusals/${client ?? ""}`);
  const entry = table.head(key, "hidden");
  const before = entry ? Number(text(table.load(key, 0, entry.len))) : 0;
  table.put(key, owned(`${before + 1}`), null, null, now + DAY_MS);
  return before + 1;
}

/** What is thrown, as text. A BigInt or a cyclic value has no JSON. */
function shown(thrown) {
  try {
    return JSON.stringify(thrown);
  } catch {
    return String(thrown);
  }
}

export const admission = {
  describe: () => ({ name: "set-point-js", version: "1.0.0" }),
  admit(command) {
    try {
      if (admit(command) !== undefined) {
        throw new Error("admit returns a value: it refuses by throwing, and is not async");
      }
    } catch (error) {
      const refusal = error?.payload ?? error; // that of the table is in an Error
      const { tag, val } = Object(refusal);
      if (tag === "denied" || tag === "quota" || (tag === "other" && typeof val === "string")) {
        throw refusal;
      }
      // The host names this line as the cause of the failure.
      const place = /[\w.-]+\.js:\d+/.exec(error?.stack)?.[0] ?? "policy.js";
      const bug = (it) => `${shown(it)} is thrown, and is not { tag: "other", val: "text" }`;
      log.write("error", `${place}: ${error instanceof Error ? error.message : bug(error)}`);
      throw error;
    }
  },
};
