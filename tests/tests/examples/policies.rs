//! Tests the example policies in Rust, which extend the standard policy. The transcript of a policy
//! must hold twice: over sockets with a server, and in `statehouse policy test`, which has a
//! scripted clock and also detects hidden state.

use std::{fmt::Write, fs, path::Path};

use statehouse_tests::{policies, run, transcript};

/// The path of the transcript of an example.
pub(crate) fn transcript_of(example: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let path = path.join(example).join("transcript.txt");
    path.into_os_string().into_string().unwrap()
}

/// Asserts that a transcript holds for a policy, and that the policy has no hidden state.
pub(crate) fn assert_transcript_holds(policy: &Path, transcript: &str) {
    let policy = policy.to_str().unwrap();
    transcript::check_with(Path::new(transcript), &["--policy", policy]);
    let tested = run(&["policy", "test", policy, transcript], b"").code(0);
    tested.prints(&["no hidden state"]);
}

fn check_example(name: &str) {
    assert_transcript_holds(&policies::example(name), &transcript_of(name));
}

#[test]
fn bound_fence_matches_its_transcript() {
    check_example("bound-fence");
}

#[test]
fn incr_matches_its_transcript() {
    check_example("incr");
}

#[test]
fn write_once_matches_its_transcript() {
    check_example("write-once");
}

/// A client may send 100 changes at once, then one every 20 ms. The test uses the scripted clock,
/// since a slow machine could not send 100 changes at once.
#[test]
fn rate_limit_refuses_changes_above_50_per_second() {
    let mut text = String::from("client a\nclient b\n");
    let mut version = 0;
    let mut changes = |text: &mut String, count: u32| {
        for _ in 0..count {
            version += 1;
            writeln!(text, "a> SET k v\na< +OK\\r\\n __ts=$v{version}").unwrap();
        }
    };
    let refused =
        "a> SET k v\na< \"-ERR too many changes by this client: at most 50 per second\\r\\n\"\n";
    changes(&mut text, 100);
    text += refused;
    text += "a> GET k\na< $1\\r\\nv\\r\\n __ts=$v100\n";
    text += "b> SET other v\nb< +OK\\r\\n __ts=$b\n";
    text += "wait 19ms\n";
    text += refused;
    text += "wait 1ms\n";
    changes(&mut text, 1);
    text += refused;
    text += "wait 1000ms\n";
    changes(&mut text, 50);
    text += refused;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("transcript.txt");
    fs::write(&path, text).unwrap();
    let policy = policies::example("rate-limit");
    let (policy, path) = (policy.to_str().unwrap(), path.to_str().unwrap());
    let tested = run(&["policy", "test", policy, path], b"").code(0);
    tested.prints(&["no hidden state"]);
}
