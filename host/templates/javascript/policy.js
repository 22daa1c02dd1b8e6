// Keys under `setpoint/` hold a number from 5 to 30. The standard policy executes every command
// that this rule admits.
//
// A rule must not keep state between two requests: the store re-executes redelivered requests, and
// the answer must have the same bytes. It may keep state in hidden keys of the table.

import log from "statehouse:policy/log@1.0.0";

const NUMBER = /^-?[0-9]{1,6}(\.[0-9]{1,6})?$/;

const text = (bytes) => String.fromCharCode(...bytes.subarray(0, 64));

function admit({ name, key, value }) {
  if (name !== "SET" || !text(key).startsWith("setpoint/")) return;
  if (!NUMBER.test(text(value)) || Number(text(value)) < 5 || Number(text(value)) > 30) {
    throw { tag: "other", val: "a set point is a number from 5 to 30" };
  }
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
  describe: () => ({ name: "{{name}}", version: "1.0.0" }),
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
