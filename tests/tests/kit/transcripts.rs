//! Tests of `statehouse policy test`.

use std::fs;

use statehouse_tests::{Ran, Server, policies, run};
use tempfile::TempDir;

/// A transcript that the built-in policy passes.
const GOOD: &str = "\
# Messages of a thermostat and its display.
client display
display> KEYNOTIFY setpoint
display< +OK\\r\\n
> SET setpoint 21 PX 500
< +OK\\r\\n __ts=$v1
display! setpoint *4\\r\\n$6\\r\\nNOTIFY\\r\\n$3\\r\\nSET\\r\\n$5\\r\\nVALUE\\r\\n$2\\r\\n21\\r\\n __ts=$v1
wait 500ms
display! setpoint *2\\r\\n$6\\r\\nNOTIFY\\r\\n$6\\r\\nDELETE\\r\\n __ts=$v2
? $v2 > $v1
> GET setpoint
< $-1\\r\\n
";

/// A file with a transcript.
struct Transcript {
    _directory: TempDir,
    path: String,
}

impl Transcript {
    fn new(text: &str) -> Transcript {
        let directory = tempfile::tempdir().unwrap();
        let path = format!("{}/it.txt", directory.path().display());
        fs::write(&path, text).unwrap();
        Transcript {
            _directory: directory,
            path,
        }
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.path).unwrap()
    }

    fn test(&self, policy: &str) -> Ran {
        run(&["policy", "test", policy, &self.path], b"")
    }

    fn update(&self, policy: &str) -> Ran {
        run(&["policy", "test", policy, &self.path, "--update"], b"")
    }
}

#[test]
fn passing_transcript_simulates_its_waits() {
    let long = Transcript::new(&GOOD.replace("wait 500ms", "wait 99999999999ms"));
    let later = GOOD.replace("wait 500ms", "wait 499ms");
    let event = "display! setpoint *2";
    let early = Transcript::new(&later.replace(event, &format!("quiet\nwait 1ms\n{event}")));
    let test = ["policy", "test", "builtin", &long.path, &early.path];
    let summary = "2 transcripts, 6 requests: every line holds, no hidden state\n";
    assert_eq!(run(&test, b"").code(0).text(), summary);
}

#[test]
fn differing_line_is_shown_with_the_actual_answer() {
    let it = Transcript::new(&GOOD.replace("PX 500", "PX half").replace("$-1", "$1"));
    let path = &it.path;
    it.test("builtin").code(1).prints(&[
        &format!(
            "{path}:6\n  the transcript says  < +OK\\r\\n __ts=$v1\n  the policy says      < \"-ERR syntax error\\r\\n\"\n"
        ),
        &format!("{path}:7\n"),
        "display receives no notification",
        &format!(
            "{path}:12\n  the transcript says  < $1\\r\\n\n  the policy says      < $-1\\r\\n\n"
        ),
    ]);
    let json = run(&["policy", "test", "builtin", path, "--json"], b"").code(1);
    let json = json.object();
    assert_eq!(json["different"][0]["line"], 6);
    assert_eq!(json["requests"], 3);
}

#[test]
fn missing_lines_are_reported_and_written_by_update() {
    let bare: String = GOOD
        .lines()
        .filter(|line| !line.contains("< ") && !line.contains("! ") && !line.starts_with('?'))
        .map(|line| format!("{line}\n"))
        .collect();
    let it = Transcript::new(&bare);
    it.test("builtin").code(1).prints(&["which no line says"]);
    assert_eq!(it.text(), bare);
    it.update("builtin").code(0);
    let expected: Vec<&str> = GOOD.lines().filter(|line| !line.starts_with('?')).collect();
    assert_eq!(it.text().lines().collect::<Vec<_>>(), expected);
    it.test("builtin").code(0);
}

/// `--update` can rewrite the line of an answer, but no comparison of versions.
#[test]
fn false_comparison_still_differs_after_an_update() {
    let it = Transcript::new("> SET k v\n> SET k w\n< +OK\\r\\n __ts=$v\n? $v > $v\n");
    let text = it.update("builtin").code(1).text();
    let summary = "1 line written, 1 line differs, no hidden state\n";
    assert!(text.ends_with(summary), "{text}");
    it.test("builtin").code(1).prints(&["1 line differs"]);
}

/// Guards against a former bug: a transcript was read up to the limit, and `--update` wrote back
/// only that part.
#[test]
fn oversized_transcript_is_refused_and_left_unchanged() {
    let text = format!("> GET k\n{}", "# nothing\n".repeat((16 << 20) / 10));
    let it = Transcript::new(&text);
    it.update("builtin").fails(2, "more than 16777216 bytes");
    assert_eq!(it.text().len(), text.len());
}

#[test]
fn closed_client_loses_only_its_own_notifications() {
    let other = "client a\nclient b\na> GET k\nclose b\na< $-1\\r\\n\n";
    Transcript::new(other).test("builtin").code(0);
    // The client that took over the id is notified.
    let taken_over = "\
client a one
client z one
z> KEYNOTIFY k
z< +OK\\r\\n
> DEL k
< :0\\r\\n
> SET k v
< +OK\\r\\n __ts=$v1
z! k *4\\r\\n$6\\r\\nNOTIFY\\r\\n$3\\r\\nSET\\r\\n$5\\r\\nVALUE\\r\\n$1\\r\\nv\\r\\n __ts=$v1
";
    Transcript::new(taken_over).test("builtin").code(0);
    // A notification that was sent before a reconnect still needs its line.
    let again = taken_over.split("z! ").next().unwrap().to_owned() + "client z\n";
    let ran = Transcript::new(&again).test("builtin").code(1);
    ran.prints(&["which no line says"]);
}

#[test]
fn unreadable_transcript_is_refused_with_its_cause() {
    for (text, says) in [
        (
            "# one\nconfig listen = \"::\"\n",
            "line 2: config listen means nothing",
        ),
        (
            "config max_keys = 2\n\nconfig node = 5\n",
            "line 3: config node is a text",
        ),
        ("> GET k\nconfig node = \n", "line 2: "),
        (
            "config max_keys = 2\nconfig max_keys = 2\n",
            "line 2: this setting is given twice",
        ),
        ("> GET k\nnonsense\n", "line 2"),
        (
            "> GET k\n< $-1\\r\\n\n> GET k -- @qso=1\n",
            "it.txt: line 3: unknown option \"@qso=1\"",
        ),
        (
            "> GET k -- @qos=3\n",
            "line 1: \"@qos=3\": the QoS is 0, 1 or 2",
        ),
    ] {
        Transcript::new(text).test("builtin").fails(2, says);
    }
    let ran = run(&["policy", "test", "builtin", "/no/such.txt"], b"");
    ran.fails(2, "/no/such.txt");
    run(&["policy", "test", "builtin"], b"").code(2);
    // A line about an unknown client counts as a difference and does not end the run.
    let it = Transcript::new("other> GET k\nat 5\n? $a = $b\n> GET k -- __ts=$none\n");
    it.test("builtin").code(1).prints(&[
        "there is no client other",
        "never goes back",
        "$a has no value",
        "$none has no value",
    ]);
}

/// `COUNT` returns the number of requests that the policy's instance has answered.
#[test]
fn hidden_state_of_a_policy_is_found_with_its_request() {
    let text = "> COUNT k\n< :1\\r\\n\n> COUNT k\n< :2\\r\\n\n> SET k fine\n< +OK\\r\\n\n";
    let it = Transcript::new(text);
    it.test(policies::faulty()).code(1).prints(&[
        &format!(
            "{}:3\n  hidden state         > COUNT k\n  it shows             a fresh instance answers :1\\r\\n\n",
            it.path
        ),
        "every line holds, hidden state in 1 line",
    ]);
}

#[test]
fn failure_of_a_policy_is_shown_with_its_cause() {
    let it = Transcript::new("> SET k panic\n< +OK\\r\\n\n> GET k\n< $-1\\r\\n\n");
    let ran = it.test(policies::faulty()).code(1);
    ran.prints(&[
        &format!(
            "{}:1\n  the policy fails at  > SET k panic\n  the cause is         tests/policies/faulty/src/lib.rs:",
            it.path
        ),
        // The failed request's staged writes were discarded, so the second answer matches.
        "1 line differs, the policy failed at 1 line",
    ]);
    let text = ran.text();
    let cause = text.matches("tests/policies/faulty/src/lib.rs:");
    assert_eq!(cause.count(), 1, "the log repeats it: {text}");
}

/// Regression: time that passes called the policy too, and its failures were not shown.
#[test]
fn failure_at_an_expiry_is_shown_with_its_line() {
    let text = "> SET bad-notify fine\n< +OK\\r\\n\n> KEYNOTIFY bad-notify\n< +OK\\r\\n\nwait 1s\n";
    let it = Transcript::new(text);
    it.update(policies::faulty()).code(1).prints(&[
        &format!(
            "{}:5\n  the policy fails at  wait 1s\n  the cause is         tests/policies/faulty/src/lib.rs:",
            it.path
        ),
        "the policy failed at 1 line",
    ]);
}

#[test]
fn logged_lines_are_shown_with_their_request() {
    let it = Transcript::new("> GET k\n< $-1\\r\\n\n> SET k say hello\n< +OK\\r\\n\n");
    let text = it.test(policies::faulty()).code(0).text();
    let shown = format!("{}:3\n  the policy logs      info: hello\n", it.path);
    assert!(text.starts_with(&shown), "{text}");
}

/// Regression: `--update` wrote `-ERR internal error` as the expected answer of a failed request,
/// and the transcript held from then on.
#[test]
fn failed_request_is_never_an_expected_answer() {
    for text in [
        "> SET k panic\n> GET k\n",
        "> SET k panic\n< +OK\\r\\n\n> GET k\n",
        "> SET k panic\n< \"-ERR internal error\\r\\n\"\n> GET k\n",
    ] {
        let it = Transcript::new(text);
        let faulty = policies::faulty();
        it.update(faulty)
            .code(1)
            .prints(&["the policy failed at 1 line"]);
        // The other lines are corrected.
        assert_eq!(it.text(), format!("{text}< $-1\\r\\n\n"));
        it.test(faulty).code(1);
    }
}

/// Regression: a line was compared with the failure of an earlier request that has no line, and
/// another update shifted all later lines by one.
#[test]
fn line_is_about_the_first_request_that_did_not_fail() {
    let it = Transcript::new("> SET a fine\n> SET b panic\n> GET b\n> GET c\n");
    let update = |policy: &str, code, says: &str| {
        let text = it.update(policy).code(code).text();
        let expected = format!("1 transcript, 4 requests: {says}no hidden state");
        assert_eq!(text.lines().last().unwrap(), expected);
    };
    let faulty = policies::faulty();
    let failed = "every line holds, the policy failed at 1 line, ";
    update(faulty, 1, &format!("3 lines written, {failed}"));
    let written = "\
> SET a fine
< +OK\\r\\n
> SET b panic
> GET b
< $-1\\r\\n
> GET c
< $-1\\r\\n
";
    for _ in 0..2 {
        assert_eq!(it.text(), written);
        update(faulty, 1, failed);
    }
    // A repaired policy gets the missing line, and no other one changes its place.
    update("builtin", 0, "3 lines written, every line holds, ");
    let lines: Vec<_> = written.lines().collect();
    let now = it.text();
    let requests: Vec<_> = now.lines().filter(|it| it.starts_with('>')).collect();
    assert_eq!(requests, [lines[0], lines[2], lines[3], lines[5]]);
    assert!(now.ends_with("> GET c\n< $-1\\r\\n\n"), "{now}");
    assert!(now.contains("> GET b\n< $5\\r\\npanic\\r\\n "), "{now}");
}

/// Regression: a later request without a line made room for a shift. The update moved the line of
/// the second request to the first one, and the next line had no request.
#[test]
fn pipelined_requests_keep_their_lines_before_a_failure() {
    let text = |first: &str| {
        format!("> SET a fine\n> GET b\n< {first}\\r\\n\n< $-1\\r\\n\n> SET c panic\n")
    };
    let it = Transcript::new(&text("+OLD"));
    for _ in 0..2 {
        let ran = it.update(policies::faulty()).code(1);
        ran.prints(&["the policy failed at 1 line"]);
        assert_eq!(it.text(), text("+OK"));
    }
}

#[test]
fn policy_may_notify_on_its_own_topics() {
    let it = Transcript::new("> KEYNOTIFY k\n< +OK\\r\\n\n> SET k fine\n");
    let faulty = policies::faulty();
    it.update(faulty).code(0);
    let written = it.text();
    let end = "< +OK\\r\\n\n! \"\" changed\\r\\n @topic=told/6D65/end __ts=$v1\n";
    assert!(written.ends_with(end), "{written}");
    it.test(faulty).code(0);
    fs::write(&it.path, written.replace("6D65", "6D66")).unwrap();
    it.test(faulty).code(1);
}

#[test]
fn standard_policy_conforms_and_a_faulty_one_does_not() {
    let conformance = |policy: &str| run(&["policy", "test", policy, "--conformance"], b"");
    let standard = conformance("builtin").code(0);
    standard.prints(&["every line holds"]);
    conformance(policies::faulty()).code(1);
}

#[test]
fn transcript_with_a_snapshot_starts_with_its_table() {
    let server = Server::start();
    let mut store = server.store("writer");
    store.set("old", "value");
    let backup = server.directory().join("backup");
    let backup = backup.to_str().unwrap();
    run(&["snapshot", backup, "--data", &server.data()], b"").code(0);
    let it = Transcript::new(
        "> GET old\n< $5\\r\\nvalue\\r\\n __ts=$v1\n> SET old new\n< +OK\\r\\n __ts=$v2\n? $v2 > $v1\n",
    );
    let test = ["policy", "test", "builtin", &it.path, "--snapshot"];
    let with_table = |table: &str| run(&[&test[..], &[table]].concat(), b"");
    with_table(backup).code(0);
    it.test("builtin").code(1);
    with_table(&it.path).fails(3, "Use another backup");
    assert_eq!(store.get("old"), Some(b"value".to_vec()));
}
